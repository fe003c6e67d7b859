"""Models of the user's own on the Setup page: kinds, paths, and folders that the server may run them from."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.view_models import setup_form
from app.view_models.model_source import allowed_folders, kind_of, path_of, problem_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("mine/model.py", "mine/program.pt2", "mine/config.json", "other/model.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (tmp_path / "mine" / "link.py").symlink_to(tmp_path / "other" / "model.py")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("a/b.py:make", "Python"),
        ("b.py", "Python"),
        ("x/program.pt2", "torch.export"),
        ("hf:llama", "transformers"),
        ("hf:a/config.json,num_hidden_layers=2", "transformers"),
        ("llama3-8b", ""),
    ],
)
def test_kinds_are_told_apart(model: str, word: str) -> None:
    assert word in kind_of(model) and bool(kind_of(model)) == bool(word)


def test_every_kind_is_taken_from_an_allowed_folder_only(folder: Path) -> None:
    mine, other = folder / "mine", folder / "other"
    for model in (
        f"{mine}/model.py:make",
        f"{mine}/program.pt2",
        f"hf:{mine}/config.json",
        f"hf:{mine}",
        f"hf:{mine}/config.json,a=1",
    ):
        assert problem_of(model, None) is None, model
        assert problem_of(model, [mine]) is None, model
        assert "--model-code" in (problem_of(model, [other]) or ""), model
        assert "--model-code" in (problem_of(model, []) or ""), model


def test_no_way_out_of_an_allowed_folder(folder: Path) -> None:
    mine = folder / "mine"
    for model in (f"{mine}/../other/model.py:make", f"{mine}/link.py:make", f"{folder}/mineral.pt2"):
        assert "--model-code" in (problem_of(model, [mine]) or ""), model


def test_what_is_missing_is_said(folder: Path) -> None:
    assert "names no factory" in (problem_of(f"{folder}/mine/model.py", None) or "")
    assert "names no factory" in (problem_of(f"{folder}/mine/model.py:", None) or "")
    for model in (f"{folder}/none.py:make", f"{folder}/none.pt2", f"hf:{folder}/none/config.json"):
        assert "There is no file" in (problem_of(model, None) or ""), model
    assert path_of("hf:llama") is None and problem_of("hf:llama", []) is None, "a class of the library reads no file"


@pytest.mark.parametrize(
    ("arguments", "address", "found"),
    [
        ([], "127.0.0.1", None),
        ([], "0.0.0.0", ()),
        ([], None, ()),
        (["--model-code", "/a", "--workspace", "/w", "--model-code", "/b"], "0.0.0.0", (Path("/a"), Path("/b"))),
        (["--model-code"], "localhost", None),
    ],
)
def test_a_server_that_others_reach_runs_no_code_unless_told(
    arguments: list[str], address: str | None, found: tuple[Path, ...] | None
) -> None:
    assert allowed_folders(arguments, address) == found


def test_the_form_refuses_what_the_server_may_not_run(folder: Path) -> None:
    form = setup_form.SetupForm(custom_model=f"{folder}/other/model.py:make")
    refused = setup_form.read(form, [folder / "mine"])
    assert refused.request is None and "--model-code" in refused.errors["custom_model"]
    taken = setup_form.read(form, [folder / "other"])
    assert taken.request is not None and taken.request.model.model == form.custom_model
