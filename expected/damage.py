"""For the drill-damage transcripts: makes wrong recovery points, and says what the drill makes of them.

To be imported in a folder that holds distributed_04.py and an accepted checkpoint, good/.
"""

import collections
import pathlib
import re
import shutil
from collections.abc import Iterable

import numpy as np
import orbax.checkpoint as ocp

import distributed_04 as drill

HERE = pathlib.Path.cwd()


def arrays(state: drill.State) -> dict[str, np.ndarray]:
    return {leaf: drill.host(array) for leaf, array in state.items()}


def outcome(folder: pathlib.Path) -> str:
    """`identical`, `SILENT DIFFERENCE`, or what the drill says where it stops."""
    try:
        loaded = arrays(drill.load_accepted(folder))
    except (drill.Failed, drill.Refused) as problem:
        line = str(problem).replace(str(HERE), "$WORK")
        return type(problem).__name__ + ": " + line if line.isprintable() else "MORE THAN ONE LINE"
    except Exception as error:
        return f"UNEXPECTED {type(error).__name__}: {error}"
    alike = all(loaded[leaf].tobytes() == value.tobytes() for leaf, value in good.items())
    return "identical" if alike else "SILENT DIFFERENCE"


def point(name: str, state: dict) -> pathlib.Path:
    """Saves `state` as the step-one of a new folder, under the manifest that good/ was accepted with."""
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(HERE / "good" / "accepted.json", folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step-one", state)
    return folder


def stable(line: str) -> str:
    """The line up to where digests, or a library's words, begin."""
    return re.match(r".*?(?=: \w+Error\b|: wanted sha256|$)", line)[0]


def show(what: str, state: dict) -> None:
    print(f"{what:31}{stable(outcome(point('wrong', state)))}")


def next_up(value: np.ndarray) -> np.ndarray:
    """Another last element: the next integer, or the next float32."""
    value = value.copy()
    last = value.reshape(-1)[-1:]
    last[:] = np.nextafter(last, np.float32(9)) if value.dtype.kind == "f" else last + 1
    return value


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def sweep(what: str, changes: Iterable[tuple[pathlib.Path, bytes | None]]) -> None:
    """Loads wrong/ once for each file and its new content (None: no file), and prints what may not vary."""
    seen = collections.Counter()
    for file, data in changes:
        whole = file.read_bytes()
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        seen[outcome(HERE / "wrong").partition(":")[0]] += 1
        file.write_bytes(whole)
    caught, same = seen.pop("Failed", 0) + seen.pop("Refused", 0), seen.pop("identical", 0)
    tried = "none tried" if caught + same == 0 else "all caught" if same == 0 else "caught, or the state identical"
    print(f"{what}: {tried}; {dict(seen) or 'nothing else'}")


good = arrays(drill.load_accepted(HERE / "good"))
