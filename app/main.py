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

    from app import opening, state, streamlit_compat, work
    from app.components.headings import page_title
    from app.views import strip

    streamlit_compat.install()

    st.set_page_config(page_title="Plan explorer", layout="wide")
    is_new, found = state.is_new(), state.session()
    if is_new:
        opening.open_first(found)
    work.begin_page(found)
    pages = {
        "setup": st.Page("views/setup.py", title="Setup", url_path="setup"),
        "explorer": st.Page("views/explorer.py", title="Explorer", url_path="explorer", default=True),
        "communication": st.Page("views/communication.py", title="Communication", url_path="communication"),
        "memory": st.Page("views/memory.py", title="Memory", url_path="memory"),
        "compare": st.Page("views/compare.py", title="Compare", url_path="compare"),
        "export": st.Page("views/export.py", title="Export", url_path="export"),
    }
    current = st.navigation(list(pages.values()), position="top")
    if found.arrived and current is not pages["explorer"]:
        st.switch_page(pages["explorer"])  # a beat of the page left can take its place, and then this is tried again
    found.arrived = False
    state.write_address(found)
    page_title(current.title)
    strip.draw(found)
    current.run()
    st.session_state["page"] = current.title
    found.drawn = True


if __name__ == "__main__":
    main()
