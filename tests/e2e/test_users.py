"""Six kinds of users type what they type: scripts of a shell in `users/`, which must run through as they stand."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import find_mpirun, run

pytest.importorskip("scipy", reason="sweeps need the extra 'sweep'")
pytest.importorskip("pandas", reason="tables need the extra 'tables'")
USERS = Path(__file__).with_name("users")
# `fails COMMAND` goes on where a command has failed, with what it said in the file `said`.
FAILS = 'fails() { if "$@" 2> said; then echo "it was to fail: $*" >&2; return 1; fi; }\n'


def write_data(folder: Path) -> None:
    """Write a table, new rows of it, and a folder of pictures a class."""
    image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'images'")
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{('Lima', 'Rome')[int(a > 0)]},{a + b:.3f}" for a, b in rng.normal(size=(120, 2))]
    (folder / "houses.csv").write_text("\n".join(["area,rooms,town,price", *rows]) + "\n")
    (folder / "new.csv").write_text("area,rooms,town\n0.1,0.2,Rome\n0.3,-0.2,Lima\n1.5,1.25,Oslo\n")
    for name, shade in (("cat", 60), ("dog", 190)):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(20):
            image.fromarray(rng.integers(0, shade, (20, 24, 3), dtype=np.uint8)).save(
                folder / "pets" / name / f"{number}.jpg"
            )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("user", sorted(path.stem for path in USERS.glob("*.sh")))
def test_what_a_user_types_runs_through(user, tmp_path):
    if user in ("porter", "ranks"):
        find_mpirun()
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    write_data(tmp_path)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    script = FAILS + (USERS / f"{user}.sh").read_text(encoding="utf-8")
    environment = {"PATH": path, "PYTHONPATH": str(ROOT), "EXAMPLES": str(ROOT / "examples"), "PYTHONWARNINGS": None}
    done = run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, timeout=600, **environment)
    assert done.code == 0, done.out[-2000:] + done.err[-2000:]
    assert "Traceback" not in done.err
