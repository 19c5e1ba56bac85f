"""Files are read with one clear message and written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from planner.files import read_json, read_text, refuse_unwritable, write_folder, write_text


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json.*No such file"):
        read_text(tmp_path / "absent.json")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="cannot read"):
        read_text(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "Expecting"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1, "a": 2}', "'a' stands twice"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_broken_json_is_refused_with_the_reason(tmp_path, text, word):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json") as caught:
        read_json(path)
    assert word in str(caught.value)


def test_writing_replaces_the_whole_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_link_stays_and_what_it_names_is_written(tmp_path):
    path, link = tmp_path / "plan.json", tmp_path / "latest.json"
    path.write_text("old")
    link.symlink_to("plan.json")
    write_text(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "new")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_permissions_are_the_users(tmp_path):
    kept, fresh = tmp_path / "kept", tmp_path / "fresh"
    kept.write_text("old")
    kept.chmod(0o640)
    before = os.umask(0o077)
    try:
        write_text(kept, "new")
        write_text(fresh, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o600


def test_what_cannot_be_written_is_refused_beforehand(tmp_path):
    refuse_unwritable(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"plan\.json: No such file or directory: .*absent"):
        refuse_unwritable(tmp_path / "absent" / "plan.json")
    with pytest.raises(ValueError, match="Is a directory"):
        refuse_unwritable(tmp_path)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        write_text(Path(tmp_path / "nowhere" / "plan.json"), "text")


def test_a_folder_appears_whole_and_its_scripts_run(tmp_path):
    write_folder(tmp_path / "run", {"a.txt": "a", "launch.sh": "#!/bin/sh\n", "sub/b.txt": "b"})
    assert (tmp_path / "run" / "sub" / "b.txt").read_text() == "b"
    assert os.access(tmp_path / "run" / "launch.sh", os.X_OK)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_an_empty_folder_is_filled_and_a_full_one_kept(tmp_path):
    (tmp_path / "run").mkdir()
    write_folder(tmp_path / "run", {"a.txt": "first"})
    with pytest.raises(ValueError, match="not empty"):
        write_folder(tmp_path / "run", {"a.txt": "second"})
    assert (tmp_path / "run" / "a.txt").read_text() == "first"


def test_a_failed_folder_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(ValueError, match="No space left"):
        write_folder(tmp_path / "run", {"a.txt": "a"})
    assert list(tmp_path.iterdir()) == []
