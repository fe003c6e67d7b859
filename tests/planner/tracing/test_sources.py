"""Where models come from, and what is said when they do not come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import InputError, UnknownModelError
from planner.graph import ModelRequest
from planner.tracing.sources import find_factory, list_models, sizes_for
from planner.tracing.trace import trace
from tests.planner.tracing.common import USER_MODELS, user_request

ONE = """
import torch
from torch import nn

WIDTH = {width}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(x).sum() * WIDTH


def net():
    return Net(), (torch.randn(4, WIDTH),)
"""
"""A file whose forward uses a global of its own."""


def test_listing_models_needs_no_torch() -> None:
    code = "import sys; from planner.tracing.sources import list_models; list_models(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [m.name for m in list_models()][:3] == ["llama3-8b", "llama3-70b", "llama3-tiny"]
    assert all(m.description for m in list_models())


@pytest.mark.parametrize("model", [m.name for m in list_models()])
def test_every_listed_model_can_be_found(model: str) -> None:
    factory = find_factory(model)
    asked = {"batch": 2, "layers": 1} if model.startswith("vit-") else {"batch": 2, "seq": 4, "layers": 1}
    assert sizes_for(factory, ModelRequest(model=model, **asked)) == asked
    assert sizes_for(factory, ModelRequest(model=model, batch=2, layers=1, size="tiny")) == {"layers": 1, "size": "tiny"}


def test_two_files_of_one_name_do_not_clash(tmp_path: Path) -> None:
    for folder, width in (("a", 8), ("b", 12)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "models.py").write_text(ONE.format(width=width))
    graphs = [trace(ModelRequest(model=f"{tmp_path / folder / 'models.py'}:net")) for folder in ("a", "b", "a")]
    assert [graph.nodes[graph.inputs[0].node].outputs[0].shape[1] for graph in graphs] == [8, 12, 8]


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    for width in (8, 12):
        path.write_text(ONE.format(width=width))
        graph = trace(ModelRequest(model=f"{path}:net"))
        assert graph.nodes[graph.inputs[0].node].outputs[0].shape == (4, width)


def test_unknown_name_lists_models_and_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match="llama3-8b, llama3-70b, llama3-tiny") as caught:
        trace(ModelRequest(model="lama3-8b"))
    assert "Did you mean llama3-8b?" in caught.value.hint and "file.py:factory" in caught.value.hint


def test_missing_file_and_missing_factory() -> None:
    with pytest.raises(UnknownModelError, match=r"there is no file nowhere\.py"):
        trace(ModelRequest(model="nowhere.py:mlp"))
    with pytest.raises(UnknownModelError, match="has no function 'mpl'; it has mlp, ") as caught:
        trace(user_request("mpl"))
    assert "Did you mean mlp?" in caught.value.hint


def test_broken_files_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\n\ndef net(:\n    pass\n")
    with pytest.raises(InputError, match=r"broken\.py:3 is not valid Python"):
        trace(ModelRequest(model=f"{path}:net"))
    path.write_text("import torch\n\nimport there_is_no_such_module\n")
    with pytest.raises(InputError, match=r"ModuleNotFoundError.*line 3"):
        trace(ModelRequest(model=f"{path}:net"))
    path.write_text(ONE.format(width=8))
    assert trace(ModelRequest(model=f"{path}:net")).num_ops


def test_sizes_the_factory_does_not_take() -> None:
    with pytest.raises(InputError, match=r"does not take layers=3, seq=5") as caught:
        trace(ModelRequest(model=f"{USER_MODELS}:mlp_with_sizes", layers=3, seq=5, batch=2))
    assert "accepts batch" in caught.value.hint
    graph = trace(ModelRequest(model=f"{USER_MODELS}:mlp_with_sizes", batch=2))
    assert graph.nodes[graph.inputs[0].node].outputs[0].shape == (2, 16)
    with pytest.raises(InputError, match="layers is 0"):
        trace(ModelRequest(model="llama3-tiny", layers=0))


@pytest.mark.parametrize(("field", "value"), [("precision", "fp8"), ("size", "huge")])
def test_unknown_choices(field: str, value: str) -> None:
    with pytest.raises(InputError, match=f"'{value}' is not a {field}"):
        trace(ModelRequest(model="llama3-tiny", **{field: value}))


def test_a_factory_that_reads_values_while_building() -> None:
    assert trace(user_request("builds_with_values")).nodes[0].outputs[0].shape == (24, 16)
