# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy"]
# ///
"""Recovery audit: does a saved training state continue, or does it merely load?

Write four functions by the contract below; the audit looks for what is wrong with them. The training is two weights
with momentum, a random perturbation and a cursor over four examples: small enough to try every bit of its checkpoint.
Stage 1: one update agrees with independent arithmetic. 2: it goes on after save and restore in a fresh process.
3: another configuration, a damaged file, an interrupted save are noticed. 4: all of them.
COURSE_CHECKPOINT_DIR keeps the first checkpoint of stage 2 there, as recovery-audit.ckpt; with COURSE_RESUME=1 stage 2
restores that file, of an earlier run, instead. Exit status: 0 `PASS recovery-audit stage N`; 1 `FAIL recovery-audit
stage N: <field or check>: wanted ..., got ...`; 2 cannot start as asked. Implementations print to standard error.

The contract
  state   dict of NumPy values: weight float64 (2,), velocity float64 (2,), cursor int64 (), key uint64 (2,)
  config  dict of floats: learning_rate, momentum, noise
  initial_state() -> state            always the same; no velocity 0, 0 <= cursor < 4
  update(state, config) -> state      a new state; what was given stays as it was
  save(path, state, config) -> None   one file at path (str), at most 4096 bytes. Killed at any moment, or by a power
      cut, it leaves the old or the new one whole: temporary file, fsync, rename over path, fsync of the folder
  restore(path, config) -> state      the state saved, to the bit; runs nothing a file brings (pickle, eval). Raises
      CorruptCheckpoint (a ValueError) if path does not hold, byte for byte, what save wrote; else
      ConfigMismatch (a ValueError) if config has not the names and values saved; the message names one that differs
The update for the example (x, y) = EXAMPLES[cursor], whose squared error is (x . weight - y)**2
  words      Philox(key=key).random_raw(4)    NumPy's Philox4x64-10 from counter 0, uint64, the same in every version
  gradient   2 (x . weight - y) x + noise * ((words[0:2] >> 11) / 2**53 - 1/2)
  velocity'  momentum * velocity + gradient   as in torch.optim.SGD
  weight'    weight - learning_rate * velocity'
  cursor'    (cursor + 1) mod 4;    key'  words[2:4]
Floats may differ by 1e-12 of their size. Philox (Salmon et al., 2011) is counter-based: it has no state but its key.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import types
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock, Timer

import numpy as np
from numpy.random import Philox

# As a script this module is `__main__`. A second copy, imported by an implementation, would raise strange exceptions.
sys.modules.setdefault("recovery_audit", sys.modules[__name__])
EXAMPLES = (((1.0, 0.5), 0.75), ((-0.5, 1.25), -0.5), ((0.75, -1.0), 1.5), ((1.5, 0.25), 0.25))  # (x, y)
CONFIG = {"learning_rate": 0.05, "momentum": 0.9, "noise": 0.1}
OTHER_CONFIG = {"learning_rate": 0.02, "momentum": 0.6, "noise": 0.3}
# Causes before effects: a wrong key shows in the velocity too, a wrong velocity in the weight.
FIELDS = {"key": "uint64 (2,)", "cursor": "int64 ()", "velocity": "float64 (2,)", "weight": "float64 (2,)"}
RTOL = 1e-12
MAX_BYTES = 4096  # of a checkpoint: every bit of it is tried
SECONDS = 120  # for the whole audit: an implementation may hang
FORMAT = b"recovery-audit 1\n"  # under the digest, so that no other program's file has a right one
CHECKPOINT, EVIDENCE = "recovery-audit.ckpt", "recovery-audit-evidence.json"
State, Config = dict[str, np.ndarray | np.generic], dict[str, float]

class ConfigMismatch(ValueError):
    """The checkpoint was saved under another configuration."""

class CorruptCheckpoint(ValueError):
    """The file is not, byte for byte, what save wrote."""

def make_state(**values) -> State:
    return {name: np.array(values[name], text.split()[0])[()] for name, text in FIELDS.items()}

class solution:
    """One answer: the file is a line of SHA-256, then config and state as JSON, whose floats come back exactly."""
    def initial_state() -> State:
        return make_state(weight=[0.5, -0.25], velocity=[0.125, -0.375], cursor=0, key=[17, 41])

    def update(state: State, config: Config) -> State:
        x, y = EXAMPLES[state["cursor"]]
        words = Philox(key=state["key"]).random_raw(4)
        perturbation = (words[:2] >> 11) / 2**53 - 0.5
        gradient = 2 * ((x * state["weight"]).sum() - y) * np.array(x) + config["noise"] * perturbation
        velocity = config["momentum"] * state["velocity"] + gradient
        weight = state["weight"] - config["learning_rate"] * velocity
        cursor = np.int64((state["cursor"] + 1) % len(EXAMPLES))
        return {"weight": weight, "velocity": velocity, "cursor": cursor, "key": words[2:]}

    def save(path: str, state: State, config: Config) -> None:
        body = json.dumps({"config": config, "state": {name: state[name].tolist() for name in FIELDS}}).encode()
        with open(f"{path}.tmp", "wb") as file:
            file.write(hashlib.sha256(FORMAT + body).hexdigest().encode() + b"\n" + body)
            file.flush()
            os.fsync(file.fileno())  # or a power cut after the rename leaves a name without its bytes
        os.replace(f"{path}.tmp", path)
        if os.name == "posix":
            folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
            os.fsync(folder)  # or a power cut undoes the rename
            os.close(folder)

    def restore(path: str, config: Config) -> State:
        if not os.path.isfile(path):
            raise CorruptCheckpoint("not a file")
        digest, _, body = Path(path).read_bytes().partition(b"\n")
        if hashlib.sha256(FORMAT + body).hexdigest().encode() != digest:
            raise CorruptCheckpoint("contents and SHA-256 disagree: use an earlier checkpoint")
        saved = json.loads(body)
        for name in sorted(saved["config"].keys() | config.keys()):
            before, now = saved["config"].get(name, "nothing"), config.get(name, "nothing")
            if before != now:
                raise ConfigMismatch(f"{name}: saved with {before}, restored with {now}")
        return make_state(**saved["state"])

class starter:
    """Your workspace: write the four functions, stage by stage, by the contract at the top of this file."""
    def initial_state() -> State:
        """The state before the first update. Hint: numpy.array(values, dtype), numpy.int64(0)."""
        raise NotImplementedError("write starter.initial_state")

    def update(state: State, config: Config) -> State:
        """The state after one more example, in new arrays. Hint: the contract's lines, in their order."""
        raise NotImplementedError("write starter.update")

    def save(path: str, state: State, config: Config) -> None:
        """Replaces the checkpoint at path, atomically and durably. Hint: hashlib.sha256, os.fsync, os.replace."""
        raise NotImplementedError("write starter.save")

    def restore(path: str, config: Config) -> State:
        """The state saved at path. Hint: trust nothing before the digest; then compare every name of both configs."""
        raise NotImplementedError("write starter.restore")

def expected_update(state: State, config: Config) -> State:
    """One update, number by number in plain Python: no arithmetic is shared with `solution`."""
    (x, y), weight, velocity = EXAMPLES[int(state["cursor"])], state["weight"].tolist(), state["velocity"].tolist()
    error = x[0] * weight[0] + x[1] * weight[1] - y
    words = Philox(key=state["key"]).random_raw(4).tolist()
    for i in range(2):
        gradient = 2 * error * x[i] + config["noise"] * ((words[i] >> 11) / 2**53 - 0.5)
        velocity[i] = config["momentum"] * velocity[i] + gradient
        weight[i] -= config["learning_rate"] * velocity[i]
    return make_state(weight=weight, velocity=velocity, cursor=(int(state["cursor"]) + 1) % 4, key=words[2:])

class Fault(Exception):
    """A check that failed: Fault(field or check, wanted, got)."""

def show(value: object) -> str:
    """A field as text: type, dtype, shape and every value with all its digits."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return f"{value.dtype} {value.shape}" + (f" {value.ravel().tolist()}" if value.dtype.kind in "iuf" else "")
    return type(value).__name__ + (f" [{value}]" if type(value) in (int, float) else "")

def texts(state: dict) -> dict[str, str]:
    return {name: show(value) for name, value in state.items()}

def compare(wanted: dict[str, str], got: dict[str, str], source: str) -> None:
    """Raises Fault for the first field whose text is not the one wanted, or does not begin with it (FIELDS)."""
    for name in [*FIELDS, *wanted, *got]:
        one, other = wanted.get(name, "no such field"), got.get(name, "no such field")
        if not other.startswith(one):
            raise Fault(f"{name} {source}", one, other)

def calls_in(action: Callable, look: Callable = lambda: None) -> str:
    """Names of the functions action() calls. look() runs around each C function, for a folder changes nowhere else."""
    names = []
    def note(frame, event, function) -> None:
        if event == "c_call":
            names.append(f"{getattr(function, '__module__', None)}.{function.__qualname__}")
        elif event == "call":
            more = " allow_pickle=True" if frame.f_locals.get("allow_pickle") else ""
            names.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}{more}")
        look()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return " ".join(names)

class Audit:
    """Questions to one implementation. A check yields what it has tried and seen, and raises Fault at a surprise."""
    def __init__(self, name: str, kept: Path | None = None, resume: bool = False):
        self.name = os.path.abspath(name) if name.endswith(".py") else name
        self.kept, self.resume, self.after = kept, resume, ""
        self.running, self.process = "loading the implementation", None  # what to name, and to kill, at the end

    def call(self, function: str, *arguments) -> object:
        """What the function returns. Whatever it raises, SystemExit too, is a finding: a Fault that it caused."""
        self.running = function
        try:
            return self.functions[function](*arguments)
        except BaseException as error:
            from traceback import format_exception_only  # it survives an exception whose text cannot be had
            raise Fault(function + self.after, "a return", "".join(format_exception_only(error))) from error

    def ask(self, function: str, *arguments) -> State:
        """The state returned, once its fields, types, dtypes and shapes are the contract's."""
        state = self.call(function, *arguments)
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise Fault(function, "a dict with str keys", show(state))
        compare(FIELDS, texts(state), f"from {function}")
        return state

    def two_states(self) -> tuple[State, State]:
        """The state at the start, checked, and the one after it."""
        old, again = self.ask("initial_state"), self.ask("initial_state")
        if not (old["velocity"].all() and 0 <= old["cursor"] < len(EXAMPLES)):
            raise Fault("initial_state", "no velocity 0, 0 <= cursor < 4", texts(old))
        compare(texts(old), texts(again), "from initial_state, called again")
        return old, self.ask("update", again, dict(CONFIG))

    def save(self, path: Path, state: State, config: Config = CONFIG) -> None:
        """Saves; Fault unless that made one file, small enough to be tried, and left the state alone."""
        before, others = texts(state), {*os.listdir(path.parent)} - {path.name}
        self.call("save", str(path), state, dict(config))
        compare(before, texts(state), "given to save")
        made = {f.name: f.is_file() and f.stat().st_size for f in sorted(path.parent.iterdir()) if f.name not in others}
        if [*made] != [path.name] or not 0 < made[path.name] <= MAX_BYTES:
            raise Fault("files made by save", f"{path.name}, of at most {MAX_BYTES} bytes", made)

    def new_path(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.scratch), CHECKPOINT)

    def fresh_process(self, path: Path) -> Iterator[dict]:
        """What child(path) yields in a process of its own, which is self.process."""
        from subprocess import PIPE, Popen  # here, or stage 1 would pay for it
        command = [sys.executable, os.path.abspath(__file__), "--fresh-process", self.name, str(path)]
        self.running, self.process = "restore, update or save in a fresh process", Popen(command, stdout=PIPE)
        for answer in map(json.loads, self.process.stdout):
            if isinstance(answer, list):
                raise Fault(f"{answer[0]} in a fresh process", *answer[1:])
            yield answer
        raise Fault("fresh process", "an answer", f"exit status {self.process.wait()}")

    def child(self, path: Path) -> Iterator[dict]:
        """Restores the checkpoint at path and updates once; where there is none, saves until it is killed."""
        if path.exists():
            state = self.ask("restore", str(path), dict(CONFIG))
            yield texts(state)
            yield texts(self.ask("update", state, dict(CONFIG)))
        else:
            _, old = self.two_states()
            new = self.ask("update", old, dict(CONFIG))
            while True:
                self.save(path, old)
                yield {}
                self.save(path, new)

    def one_update(self, state: State, _: State) -> Iterator[str]:
        """update agrees with independent arithmetic, the same input twice, and leaves its input alone"""
        for i in range(12):  # every cursor under each of three configurations, never the same key
            config = dict((CONFIG, OTHER_CONFIG, {**CONFIG, "learning_rate": 0.01})[i % 3])
            given, before, wanted = state, texts(state | config), expected_update(state, config)
            for _ in range(2):
                state = self.ask("update", given, config)
                for name in "velocity", "weight":
                    if (np.abs(state[name] - wanted[name]) <= RTOL * np.abs(wanted[name])).all():
                        wanted[name] = state[name]  # and so, to the bit, at the second call
                compare(texts(wanted), texts(state), f"from update at cursor {given['cursor']} with {config}")
                compare(before, texts(given | config), "given to update")
                yield f"cursor {given['cursor']}: agrees"

    def restart(self, old: State, new: State) -> Iterator[str]:
        """update, save, restore in a fresh process, update: to the bit what two updates in one process give"""
        chain, cases = [old, new], []
        for n in range(1, len(EXAMPLES) + 1):  # so at every cursor
            chain.append(self.ask("update", chain[n], dict(CONFIG)))
            cases.append((f"update {n}", *chain[n:], self.kept if self.kept and n == 1 else self.new_path()))
        extreme = make_state(weight=[-0.0, 5e-324], velocity=[1e300, np.pi], cursor=3, key=[2**64 - 1, 0])
        cases.append(("extreme values", extreme, self.ask("update", extreme, dict(CONFIG)), self.new_path()))
        for _, state, _, path in cases:  # all saved before any is restored: what is kept elsewhere fits one at most
            if not (self.resume and path == self.kept):
                self.save(path, state)
        for where, state, following, path in cases:
            path = path if path == self.kept else path.rename(self.new_path())  # the file alone
            before, process = (path.read_bytes(), path.stat().st_mtime_ns), self.fresh_process(path)
            compare(texts(state), next(process), f"from restore in a fresh process, saved at {where}")
            compare(texts(following), next(process), f"from update after restore, saved at {where}")
            if not path.exists() or (path.read_bytes(), path.stat().st_mtime_ns) != before:
                raise Fault("file after restore", "bytes and time stamp as before", "others")
            yield f"{where}: equal"

    def refused(self, what: str, wanted: type, path: Path, config: Config, name: str = "") -> str:
        try:
            self.call("restore", str(path), dict(config))
            raise Fault("restore", "a refusal", "a return")
        except Fault as fault:
            if not isinstance(fault.__cause__, wanted) or name not in fault.args[2]:
                raise Fault(f"restore, {what}", wanted.__name__ + (name and f" naming {name}"), fault.args[2]) from None
        return f"{what.split(':')[0]}: {wanted.__name__}"

    def refusal(self, _: State, new: State) -> Iterator[str]:
        """restore raises ConfigMismatch for any other configuration, CorruptCheckpoint for any damage to the file"""
        path, folder, saved = self.new_path(), self.new_path(), OTHER_CONFIG
        self.save(path, {name: np.flip(value).copy() for name, value in new.items()}, saved)
        other = path.read_bytes()  # of another state, yet as long, and with each of its parts in the same place
        self.save(path, new, saved)
        data, size = path.read_bytes(), path.stat().st_size
        compare(texts(new), texts(self.ask("restore", str(path), dict(saved))), "from restore")
        for name, value in saved.items():
            yield self.refused(f"{name} missing", ConfigMismatch, path, {k: saved[k] for k in saved if k != name}, name)
            for n in 2 * value, np.nextafter(value, 1), -value, 0.0, CONFIG[name], np.nan:
                yield self.refused(f"{name} changed: {n}", ConfigMismatch, path, {**saved, name: n}, name)
        yield self.refused("values exchanged", ConfigMismatch, path, dict(zip(saved, [*saved.values()][::-1])))
        yield self.refused("decay added", ConfigMismatch, path, {**saved, "decay": 0.0}, "decay")
        folder.mkdir()
        yield self.refused("a folder in its place", CorruptCheckpoint, folder, saved)
        damaged = [("byte appended", n, data + bytes([n])) for n in range(256)]
        damaged += [("bit flipped", n, (int.from_bytes(data) ^ 1 << n).to_bytes(size)) for n in range(8 * size)]
        for n in range(size):
            damaged += [("end cut off", n, data[:n]), ("space inserted", n, data[:n] + b" " + data[n:])]
            damaged += [("bytes exchanged", n, data[:n] + data[n : n + 2][::-1] + data[n + 2 :])]
            damaged += [("end of another", n, data[:n] + other[n:])]  # so with the digest of another, too
        for what, n, contents in damaged:
            if contents not in (data, other):
                path.unlink(missing_ok=True)  # some file systems flush a file that is rewritten, which is slow
                path.write_bytes(contents)
                yield self.refused(f"{what}: {n}", CorruptCheckpoint, path, saved)
        path.write_bytes(data)
        names = calls_in(lambda: self.ask("restore", str(path), dict(saved)))
        if call := re.search(r"\S*(pickle\._?loads?|ler\.load|marshal\.loads?|ns\.eval|ns\.exec|pickle=True)", names):
            raise Fault("restore", "nothing that runs what a file brings", f"a call of {call[0]}")

    def interruption(self, _: State, old: State) -> Iterator[str]:
        """save stopped anywhere, or killed, leaves the old or the new checkpoint whole; it syncs file and folder"""
        left, new = [], self.ask("update", old, dict(CONFIG))  # left: (how, state before, files left behind)
        def files() -> dict[str, bytes]:
            return {file.name: file.read_bytes() if file.is_file() else b"" for file in path.parent.iterdir()}
        for how, before in ("a first save stopped", None), ("a save stopped", old):
            path, seen = self.new_path(), []
            if before:
                self.save(path, before)
            names = calls_in(lambda: self.save(path, new), lambda: files() in seen or seen.append(files()))
            left += [(how, before, found) for found in seen]
        if not any(len(found) > 1 for found in seen):
            raise Fault("temporary file of save", "one beside the checkpoint, to be renamed over it", "none")
        order = " ".join(re.findall(rf"\b{os.name}\.(fsync|rename|replace)\b", names))
        if not re.search("fsync (rename|replace)" + " fsync" * (os.name == "posix"), order):
            raise Fault("order in save", "fsync of the file, rename, fsync of the folder", order or "none of them")
        for _ in range(3):
            path = self.new_path()
            next(self.fresh_process(path))  # the first save is done, the next has begun
            self.process.kill()
            self.process.wait()
            left.append(("a save killed", old, files()))
        for how, before, found in left:
            path = self.new_path()
            for name, contents in found.items():
                path.with_name(name).write_bytes(contents)
            self.after = f" after {how}"
            got = self.ask("restore", str(path), dict(CONFIG)) if before or path.exists() else {}
            if texts(got) not in (texts(before or {}), texts(new)):
                raise Fault(f"restore{self.after}", "all of the old or all of the new state", texts(got))
            self.save(path, new)
            compare(texts(new), texts(self.ask("restore", str(path), dict(CONFIG))), "from restore, saved again")
            yield f"{how}: whole"

def refuse(reason: str) -> None:
    print("recovery_audit.py:", " ".join(reason.split()), file=sys.stderr)
    sys.exit(2)

def load(name: str) -> dict[str, Callable]:
    """The four functions of `starter`, `solution` or a file, which is compiled here lest a stale .pyc be run."""
    source = {"starter": starter, "solution": solution}.get(name) or types.ModuleType("implementation")
    try:
        if isinstance(source, types.ModuleType):
            sys.modules["implementation"], source.__file__ = source, name
            sys.path.append(os.path.dirname(name))
            exec(compile(Path(name).read_bytes(), name, "exec"), vars(source))
        return {function: getattr(source, function) for function in ("initial_state", "update", "save", "restore")}
    except BaseException as error:
        refuse(f"--implementation {name} cannot be loaded: {type(error).__name__}: {error}")

def settings(arguments: list[str]) -> tuple[Audit, int, str | None]:
    """(audit, stage, folder for the evidence) from command line and environment, or a refusal before anything runs."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter)
    parser.error = lambda message: refuse(f"{message} (see --help)")
    parser.add_argument("--implementation", default="solution", help="starter, solution (default) or FILE.py")
    parser.add_argument("--stage", type=int, choices=range(1, 5), default=4, help="default: 4")
    parser.add_argument("--evidence-dir", type=os.path.abspath, help="default: a new temporary folder")
    options = parser.parse_args(arguments)
    folder, resume = os.environ.get("COURSE_CHECKPOINT_DIR", ""), os.environ.get("COURSE_RESUME", "")
    if resume not in ("", "0", "1"):
        refuse(f"COURSE_RESUME={resume!r}: wanted 1, or 0")
    if "://" in folder or folder.startswith("~"):
        refuse(f"COURSE_CHECKPOINT_DIR={folder}: wanted the path of a local folder")
    kept = Path(os.path.abspath(folder), CHECKPOINT) if folder and options.stage in (2, 4) else None
    resume = resume == "1" and options.stage in (2, 4)
    if resume and not (kept and kept.is_file()):
        refuse(f"COURSE_RESUME=1: no {CHECKPOINT} in COURSE_CHECKPOINT_DIR={folder}; run once without COURSE_RESUME")
    if kept and not resume and os.path.lexists(kept):
        refuse(f"{kept} exists, and is never overwritten: use a new folder, or COURSE_RESUME=1 to restore it")
    try:
        if path := options.evidence_dir:
            os.makedirs(path, exist_ok=True)
            with Path(path, EVIDENCE).open("a") as file:
                file.write(" " * 4096)  # is there room for it?
        if kept and not resume:
            os.makedirs(path := folder, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        refuse(f"{path}: {error.strerror}; name a folder that can be written")
    return Audit(options.implementation, kept, resume), options.stage, options.evidence_dir

def main(arguments: list[str]) -> int:
    child = arguments[:1] == ["--fresh-process"]
    audit, stage, folder = (Audit(arguments[1]), 0, "") if child else settings(arguments)
    out = os.fdopen(os.dup(1), "w", encoding="ascii", errors="backslashreplace")
    os.dup2(2, 1)  # what an implementation prints
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    if child:
        audit.functions = load(audit.name)
        try:
            for answer in audit.child(Path(arguments[2])):
                print(json.dumps(answer), file=out, flush=True)
        except Fault as fault:
            print(json.dumps(fault.args), file=out, flush=True)
        return 0
    end, checks = RLock(), {1: [audit.one_update], 2: [audit.restart], 3: [audit.refusal, audit.interruption]}
    records, scratch = [], tempfile.TemporaryDirectory(prefix="recovery-audit-", ignore_cleanup_errors=True)
    def conclude(fault: Fault | None) -> int:
        end.acquire()  # never released to another thread: the first verdict stands
        if audit.process:
            audit.process.kill()
        scratch.cleanup()
        name = os.path.basename(audit.name)
        text = "FAIL recovery-audit stage {}: {}: wanted {}, got {}" if fault else "PASS recovery-audit stage {}: {}"
        line = " ".join(text.format(stage, *(fault.args if fault else [name])).split())
        verdict = re.sub(r"(?<![\w.])(/|[A-Za-z]:[\\/])[^\s'\"]*[\\/]", "", line)[:1000]  # folders differ in every run
        record = {"verdict": verdict, "implementation": name, "stage": stage, "checks": records}
        evidence = Path(folder or tempfile.mkdtemp(prefix="recovery-audit-"), EVIDENCE)
        evidence.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        lines = [f"  {check['seen'].total()} tried: {check['holds']}" for check in records]
        print(verdict, *([] if fault else [*lines, f"Evidence: {evidence}"]), sep="\n", file=out, flush=True)
        return 1 if fault else 0
    timer = Timer(SECONDS, lambda: os._exit(conclude(Fault(audit.running, f"an end within {SECONDS} s", "none"))))
    timer.daemon = True
    timer.start()
    audit.functions, audit.scratch = load(audit.name), scratch.name
    try:
        old, new = audit.two_states()
        for check in sum(checks.values(), []) if stage == 4 else checks[stage]:
            records.append({"check": check.__name__, "holds": check.__doc__, "seen": Counter()})
            records[-1]["seen"].update(check(old, new))
        return conclude(None)
    except (Fault, OSError, KeyboardInterrupt) as error:
        fault = Fault("audit", "an end", f"{type(error).__name__}: {error}")
        return conclude(error if isinstance(error, Fault) else fault)

if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # threads that an implementation left behind have no say
