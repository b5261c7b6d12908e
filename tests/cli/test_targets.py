"""Files that commands write: never over what is read, and over others only where that is asked for."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import memonger
from tests.support.bad_input import CHAIN, PLAN, Place, invoke
from tests.support.stock import parse

QUICK = ("--device", "none", "--quiet", "--batch", 2)
READ = "names what is read, which is never overwritten"


@pytest.mark.parametrize("link", ["itself", "another way", "symbolic", "hard"])
@pytest.mark.parametrize("flag", ["-o", "--annotated"])
def test_the_model_is_never_overwritten(place: Place, flag: str, link: str) -> None:
    model, other = place.model(), place.folder / "other.onnx"
    if link == "itself":
        other = model
    elif link == "another way":
        other = place.folder / ".." / place.folder.name / "model.onnx"
    elif link == "symbolic":
        other.symlink_to("model.onnx")
    else:
        os.link(model, other)
    place.fails("plan", model, *QUICK, flag, other, "--force", words=(f"{flag} {other} {READ}",))


def test_no_command_overwrites_what_it_reads(place: Place) -> None:
    model, inputs = place.model(), place.folder / "inputs.npz"
    np.savez(inputs, x=np.zeros((2, 8), np.float32))
    problem = place.write("problem.csv", b"id,lower,upper,size\n1,0,1,4\n")
    for arguments in (
        ("differentiate", model, "-o", model),
        ("run", model, "--inputs", inputs, "--outputs", inputs),
        ("run", model, "--against", model, "--outputs", model),
        ("pack", problem, "-o", problem),
    ):
        place.fails(*arguments, "--force", words=(READ,))


def test_what_is_there_is_replaced_where_that_is_asked_for(place: Place) -> None:
    model, there = place.model(), place.write("there", b"mine")
    problem = place.write("problem.csv", b"id,lower,upper,size\n1,0,1,4\n")
    commands: tuple[tuple[object, ...], ...] = (
        ("plan", model, *QUICK, "-o", there),
        ("plan", model, *QUICK, "--annotated", there, "--mode", "inference"),
        ("differentiate", model, "--batch", 2, "--wrt", "x", "-o", there),
        ("pack", problem, "-o", there),
    )
    for arguments in commands:
        there.write_bytes(b"mine")
        place.fails(*arguments, words=(f"{there} is there already", "--force"))
        status, message = invoke(*arguments, "--force")
        assert status == 0, message
        assert there.read_bytes() != b"mine"


def test_two_outputs_are_two_files(place: Place) -> None:
    words = ("-o and --annotated name the same file",)
    place.fails("plan", place.model(), *QUICK, "-o", "a.onnx", "--annotated", "./a.onnx", words=words, status=2)


def test_devices_are_written_into(place: Place) -> None:
    assert invoke("plan", place.model(), *QUICK, "-o", "/dev/null")[0] == 0


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_the_weights_of_the_model_are_never_overwritten(place: Place, device: str) -> None:
    model, weights = place.weighted(), place.folder / "weights.bin"
    words = ("weights.bin holds weights of the model: name another file",)
    place.fails(*PLAN, model, "--device", device, "--quiet", "-o", weights, "--force", words=words)


def test_a_plan_in_the_folder_of_an_export_is_not_replaced_with_it(tmp_path: Path) -> None:
    from memonger.serving import export

    plan = memonger.search_plan(parse(CHAIN), mode="inference", device="none", batch=1)
    export(plan, "ray", tmp_path / "served")
    inside = tmp_path / "served" / "model.planned.onnx"
    with pytest.raises(memonger.PlanFileError, match="would be replaced: name another folder"):
        export(inside, "ray", tmp_path / "served", force=True)
    assert onnx.load(inside).graph.node
