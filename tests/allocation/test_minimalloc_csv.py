"""MiniMalloc's CSV: read, written, and refused with file and line."""

from pathlib import Path

import pytest

from memonger.allocation import Buffer, Layout, allocate, check_layout
from memonger.allocation.minimalloc_csv import PackingProblem, read_problem, write_solution
from memonger.errors import LayoutError

PACKING = sorted((Path(__file__).parents[1] / "data" / "packing").glob("*.csv"))


def write(folder: Path, text: str) -> Path:
    path = folder / "problem.csv"
    path.write_bytes(text.encode())
    return path


def test_columns_become_buffers_in_file_order(tmp_path: Path) -> None:
    problem = read_problem(write(tmp_path, "id,lower,upper,size\nb1,0,3,4\n weird id;7 ,2,9,12\n"))
    assert problem == PackingProblem(("b1", " weird id;7 "), (Buffer(0, 4, 0, 3, 1), Buffer(1, 12, 2, 9, 1)), None)


def test_columns_may_be_in_any_order_and_end_is_inclusive(tmp_path: Path) -> None:
    text = "\ufeffsize,alignment,buffer_id,end,start,offset\r\n4,32,x,2,0,64\r\n\r\n"
    assert read_problem(write(tmp_path, text)) == PackingProblem(("x",), (Buffer(0, 4, 0, 3, 32),), (64,))


def test_file_with_column_names_only_is_the_empty_problem(tmp_path: Path) -> None:
    assert read_problem(write(tmp_path, "id,lower,upper,size\n")) == PackingProblem((), ())


@pytest.mark.parametrize("path", PACKING, ids=lambda path: path.name[0])
def test_published_instances_are_read_whole(path: Path) -> None:
    problem = read_problem(path)
    lines = path.read_text().split()
    assert len(problem.buffers) == len(problem.names) == len(lines) - 1
    first = problem.buffers[0]
    assert lines[1] == f"{problem.names[0]},{first.start},{first.stop},{first.size}"


def test_solution_adds_an_offset_column_and_reads_back(tmp_path: Path) -> None:
    source = write(tmp_path, "id,lower,upper,size\nb,0,3,4\na,2,9,12\n")
    problem = read_problem(source)
    layout = allocate(problem.buffers)
    target = tmp_path / "solved.csv"
    write_solution(target, problem, layout)
    first, second = layout.offsets
    assert target.read_text() == f"id,lower,upper,size,offset\nb,0,3,4,{first}\na,2,9,12,{second}\n"
    solved = read_problem(target)
    assert (solved.names, solved.buffers, solved.offsets) == (problem.names, problem.buffers, layout.offsets)
    check_layout(solved.buffers, layout)


def test_alignment_is_written_where_one_is_not_1(tmp_path: Path) -> None:
    target = tmp_path / "solved.csv"
    write_solution(target, PackingProblem(("a",), (Buffer(0, 4, 0, 1, 64),)), Layout((128,), 132))
    assert target.read_text() == "id,lower,upper,size,alignment,offset\na,0,1,4,64,128\n"


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "solved.csv"
    target.write_text("before")
    with pytest.raises(LayoutError, match="0 offsets for 1 buffers"):
        write_solution(target, PackingProblem(("a",), (Buffer(0, 4, 0, 1, 1),)), Layout((), 0))
    unwritable = PackingProblem(("\ud800",), (Buffer(0, 4, 0, 1, 1),))
    with pytest.raises(LayoutError, match="can't be written"):
        write_solution(target, unwritable, Layout((0,), 4))
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_target_in_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="can't be written"):
        write_solution(tmp_path / "none" / "solved.csv", PackingProblem((), ()), Layout((), 0))


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "no column names"),
        ("id,lower,upper\n", 1, "no column size"),
        ("id,lower,upper,size,colour\n", 1, "'colour'"),
        ("id,lower,upper,size,start\n", 1, "'lower'"),
        ("id,lower,upper,size\na,0,1,4\nb,0,1\n", 3, "3 fields for 4 columns"),
        ("id,lower,upper,size\na,0,1,4\n\nb,0,1,4\n", 3, "1 fields for 4 columns"),
        ("id,lower,upper,size\na,0,one,4\n", 2, "upper is 'one'"),
        ("id,lower,upper,size\na,0,1,1_0\n", 2, "size is '1_0'"),
        ("id,lower,upper,size\na,0,1,99999999999999999999\n", 2, "at most 18 digits"),
        ("id,lower,upper,size\na,0,1,4\nb,1,1,4\n", 3, "start must be before its stop"),
        ("id,lower,upper,size\na,0,1,0\n", 2, "at least 1 byte"),
        ("id,lower,upper,size,alignment\na,0,1,4,3\n", 2, "power of two"),
        ("id,lower,upper,size,offset\na,0,1,4,\n", 2, "offset is ''"),
        ("id,lower,upper,size,gaps\na,0,9,4,2-3\n", 2, "gaps"),
        ("id,lower,upper,size\na,0,1,4\na,1,2,4\n", 3, "line 2 already"),
    ],
)
def test_malformed_file_is_refused_by_name_and_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(LayoutError) as caught:
        read_problem(path)
    message = str(caught.value)
    assert f"{path}, line {line}: " in message
    assert reason in message


def test_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"none\.csv can't be read"):
        read_problem(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LayoutError, match=r"binary\.csv can't be read"):
        read_problem(tmp_path / "binary.csv")
