"""Entry point: `streamlit run app/main.py [-- --workspace FOLDER]`. Configures the page and routes.

Worker processes import this file under another name, so nothing heavy happens outside `main`.
"""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)


def main() -> None:
    if ROOT not in sys.path:
        sys.path.insert(0, ROOT)  # `streamlit run` puts only this file's folder there
    import streamlit as st

    from app import state
    from app.views import strip

    st.set_page_config(page_title="Plan explorer", layout="wide")
    found = state.session()
    state.poll(found)
    found.drawn = found.version
    pages = {
        "setup": st.Page("views/setup.py", title="Setup", url_path="setup"),
        "explorer": st.Page("views/explorer.py", title="Explorer", url_path="explorer", default=True),
    }
    current = st.navigation(list(pages.values()), position="top")
    if found.arrived:
        found.arrived = False
        st.switch_page(pages["explorer"])
    state.write_address(found)
    strip.draw(found)
    current.run()
    st.session_state["page"] = current.title


if __name__ == "__main__":
    main()
