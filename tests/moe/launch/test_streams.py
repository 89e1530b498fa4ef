"""Output to a closed pipe or terminal, and error messages for files with unusual names."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from parallel.errors import BadInput
from parallel.store.files import read_text, user_path


def test_a_process_outlives_the_reader_of_both_its_streams(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from moe.launch.streams import outlive_readers
        outlive_readers()
        outlive_readers()
        print("begun", flush=True)
        sys.stdin.readline()  # waits until the test has closed the pipe's other end
        for _ in range(3):
            print("x" * 100_000, flush=True)
            print("y" * 100_000, file=sys.stderr, flush=True)
        Path(sys.argv[1]).write_text("went on")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "end")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin and process.stdout and process.stdout.readline() == b"begun\n"
    process.stdout.close()
    process.stdin.write(b"go\n")
    process.stdin.close()
    assert process.wait(timeout=30) == 0 and (tmp_path / "end").read_text() == "went on"


def test_paths_and_files_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    for text in ("~nosuchuser/x", "a" * 5000):
        with pytest.raises(BadInput, match="a path that can be looked up"):
            user_path(text, what="data.path")
    assert user_path(str(tmp_path / "none/of/it"), what="x") == tmp_path / "none/of/it"
    for name in ("Aufnahme 1.43\u202fPM", "a\u00a0b", "\u3000", "\U0001f468\u200d\U0001f469"):  # spaces and joiners of other scripts
        assert user_path(tmp_path / name, what="x") == tmp_path / name
    for name in ("a\x1b[31m", "a\0b", "a\nb", "a\u202eb", "a\u2028b", "a\udcffb"):
        with pytest.raises(BadInput, match="x: got .*, needed a path without control characters; fix: rename it"):
            user_path(f"{tmp_path}/{name}", what="x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    for name, most_bytes in (("pipe", 10), ("large", 10), ("/dev/zero", 10)):
        with pytest.raises(OSError, match="not a regular file|more than 10"):
            read_text(tmp_path / name, most_bytes=most_bytes)
    assert read_text(tmp_path / "large", most_bytes=11) == "\0" * 11
