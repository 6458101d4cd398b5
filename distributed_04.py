# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.9.2", "orbax-checkpoint>=0.12.8", "numpy"]
# ///
"""After a restart, does this training computation continue, or does it merely load?

Takes one sharded training step, saves the complete state with Orbax, restores it into explicit shardings, verifies and
accepts it. The next updates, across an epoch boundary, must then equal an uninterrupted run: sample ids, losses, every
leaf, every replica. Last, faults are injected, and each must show where this file says it shows.

    python distributed_04.py                                                         first pass on 4 logical CPU devices
    COURSE_RESUME=1 COURSE_CHECKPOINT_DIR=DIR python distributed_04.py               resume it in a fresh process
    COURSE_MULTIPROCESS=1 COURSE_CHECKPOINT_DIR=DIR srun python distributed_04.py    on every process of a job

COURSE_RESUME          1: restore the accepted checkpoint instead of saving one (0, empty or unset: off)
COURSE_MULTIPROCESS    1: join the group that Cloud TPU, Slurm or Open MPI has started (0, empty or unset: off)
COURSE_CHECKPOINT_DIR  parent of the checkpoint, shared by all processes: a folder, or gs://bucket/prefix (needs gcsfs);
                       unset in a first pass of one process: a new temporary folder
COURSE_EVIDENCE_DIR    optional folder for the JSON report and, where matplotlib is installed, the figure

Exit status: 0, last line `PASS: distributed-04`; 1, `FAIL: distributed-04: ...`, a check failed; 2, refused.
Every wait is bounded: START_SECONDS for all processes to join, PHASE_SECONDS for each later phase, SHARE_SECONDS for a
file to be seen by all. The library's own HEARTBEAT_SECONDS is longer, so that the line you read is ours.
Not claimed: that another job's checkpoint is complete; anything about hardware, network or storage this did not run on;
equal bits in recomputed floats (RTOL, ATOL); protection from someone who rewrites checkpoint and manifest.
"""
import gc

gc.disable()  # importing JAX makes a million objects that live to the end; walking them is a tenth of the run

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import io
import json
import logging
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C needs no traceback

class Refused(Exception):
    """The run cannot start as asked: exit status 2."""

class Failed(Exception):
    """A check found a difference, or a library could not do its part: exit status 1."""

# ---- Switches: read once, before the second that importing JAX costs ----

def switch(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise Refused(f"{name}={value!r} is not a switch: 1 is on; 0, empty or unset is off")
    return value == "1"

def folder_switch(name: str) -> str:
    """An absolute path or gs:// prefix; refuses what Orbax would take for another place, or could not restore from."""
    text = os.environ.get(name, "")
    on_gcs = re.match(r"gs://\w", text)
    bad = re.search(r"[][\\]|^\s|\s$", text) or re.match(r"~|\w[\w+.-]*:/", text) and not on_gcs
    if bad or not text.isprintable() or len(text.encode()) > 1000:
        raise Refused(f"{name}={text!r}: give a full path, no ~ [ ] \\, under 1000 bytes, or gs://bucket/prefix")
    if text and "step-one" in os.path.realpath(text).split("/"):
        raise Refused(f"{name}={text!r} lies in a step-one: give that folder's parent")
    if on_gcs and not importlib.util.find_spec("gcsfs"):
        raise Refused(f"{name}={text!r} needs a package: pip install gcsfs")
    return text.rstrip("/") if on_gcs else text and os.path.abspath(text)

MULTIPROCESS, RESUME, FOLDER, EVIDENCE, REFUSAL = False, False, "", "", ""
ARGUMENTS = sys.argv[1:] if __name__ == "__main__" else []
if ARGUMENTS in (["--help"], ["-h"]):
    raise SystemExit(print(__doc__))
try:
    if ARGUMENTS:
        raise Refused(f"unknown argument {ARGUMENTS[0]!r}: the switches are environment variables, see --help")
    if not all(map(importlib.util.find_spec, ("jax", "orbax", "numpy"))):
        raise Refused("a package is missing: pip install jax orbax-checkpoint numpy, or uv run distributed_04.py")
    MULTIPROCESS = switch("COURSE_MULTIPROCESS")  # from here on a refusal waits for the agreement
    RESUME, FOLDER = switch("COURSE_RESUME"), folder_switch("COURSE_CHECKPOINT_DIR")
    EVIDENCE = folder_switch("COURSE_EVIDENCE_DIR")
    if not FOLDER and (RESUME or MULTIPROCESS):
        raise Refused("COURSE_CHECKPOINT_DIR is unset: name the folder that first pass, resume and processes share")
    if __name__ == "__main__" and not FOLDER:
        FOLDER = tempfile.mkdtemp(prefix="distributed-04-")
except (Refused, OSError) as reason:  # OSError: a relative folder, or none, where none can be had
    REFUSAL = str(reason)
    if not MULTIPROCESS:  # in a group, leaving alone would strand the others
        print(f"distributed_04.py: {REFUSAL}", file=sys.stderr)
        raise SystemExit(2) from None

# ---- Runtime: nothing in the environment may bend the drill ----

LAUNCH = r"JAX_(PLATFORMS|NUM_CPU_DEVICES|COORDINATOR_\w+|LOCAL_DEVICE_IDS|PARTITION_INDEX)"
for variable in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
    if not (MULTIPROCESS and re.fullmatch(LAUNCH, variable)):
        del os.environ[variable]  # one changes every id, another every dtype, a third ends in a traceback
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # standard error is for our one line
logging.disable(logging.CRITICAL)  # a failed save logs hundreds of lines; what it raises is quoted in one
sys.unraisablehook = lambda _: None  # after a failed read, the others report to an event loop that Orbax has closed

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES = 4  # logical CPU devices of the default run; a group uses all it has
EXAMPLES_PER_DEVICE = 4
BATCH_PER_DEVICE = 2
WIDTH_PER_DEVICE = 2
LEARNING_RATE = 0.04
MOMENTUM = 0.8
DATA_SEED = 41
KEY_SEED = 17
WRONG_KEY_SEED = 999
TRUE_WEIGHTS = (-0.3, 0.4)  # ends of a line
RTOL = 2e-5
ATOL = 2e-6
REPLAY_STEPS = 3  # the first ends the epoch, the second needs a new order from the saved key
EXTRA_STEPS = 2
START_SECONDS = 60
PHASE_SECONDS = 20
SHARE_SECONDS = 5
END_SECONDS = 2
HEARTBEAT_SECONDS = 25
GATHER_BYTES = 8192
RECIPE = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "prng": "threefry2x32 partitionable",
          "data_seed": DATA_SEED, "key_seed": KEY_SEED, "true_weights": TRUE_WEIGHTS, "width": WIDTH_PER_DEVICE,
          "examples": EXAMPLES_PER_DEVICE, "batch": BATCH_PER_DEVICE}  # every constant that changes the numbers
VERSIONS = {"jax": jax.__version__, "orbax-checkpoint": ocp.__version__, "numpy": np.__version__,
            "python": platform.python_version()}

for option, pinned in (("default_prng_impl", "threefry2x32"), ("threefry_partitionable", True),
                       ("random_seed_offset", 0), ("enable_x64", False)):
    jax.config.update(f"jax_{option}", pinned)
if not MULTIPROCESS:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
# By default Orbax divides each replicated leaf among its replicas, and compiles two programs a device to do so.
ocp.type_handlers.register_type_handler(
    jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False), override=True)

def brief(value: Any, length: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[: length - 3] + "..."

def place() -> tuple[str, str]:
    """This process's prefix and address in the group, known before it has joined: asking the backend could wait."""
    known = multihost_utils.distributed.global_state
    address = f"rank {known.process_id} of {known.num_processes}, coordinator {known.coordinator_address}"
    return (f"[{known.process_id}/{known.num_processes}] ", f" ({address})") if MULTIPROCESS else ("", "")

SPEAKING = threading.Lock()

def leave(status: int, out: list[str], reason: str = "") -> NoReturn:
    """Print and exit at once: one write keeps a group's lines whole, and Orbax's threads would stay for minutes.

    A failure ends the whole group with the same lines: a peer inside a library's call would wait for this process."""
    SPEAKING.acquire()  # for good: one thread speaks for this process
    joined, prefix = multihost_utils.distributed.global_state, place()[0]
    try:
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in out))
        sys.stdout.flush()
    except Exception as error:  # a PASS that nobody can read is none
        status, reason = status or 1, reason or f"standard output cannot be written: {type(error).__name__}"
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{prefix}distributed_04.py: {reason}\n" if reason else "")
        sys.stderr.flush()
    if status and LISTENER.is_alive():
        threading.Timer(END_SECONDS, os._exit, (status,)).start()  # the coordinator may not answer
        with contextlib.suppress(Exception):  # another process was first
            joined.client.key_value_set("end", json.dumps([status, out, reason]))
        time.sleep(END_SECONDS / (2 if joined.process_id else 1))  # JAX aborts whoever outlives process 0
    os._exit(status)

def listen() -> None:
    """A thread of every process in a group: leave with the lines of whichever process ends it."""
    with contextlib.suppress(Exception):  # the group has ended well, or process 0 is gone
        client = multihost_utils.distributed.global_state.client
        leave(*json.loads(client.blocking_key_value_get("end", 1000 * START_SECONDS**2)))

LISTENER = threading.Thread(target=listen, daemon=True)

@contextlib.contextmanager
def phase(what: str, kind: type[Exception] = Failed, seconds: float = PHASE_SECONDS) -> Iterator[None]:
    """Bound what may hang, and turn whatever a library raises into one line of `kind`."""
    def give_up() -> None:
        leave(1, [f"FAIL: distributed-04: {what}: waited {seconds} s{place()[1]}"],
              "a process did not start, has died or was stopped, or the storage does not answer")

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (Refused, Failed):
        raise
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)  # no fault of the settings
        raise (Failed if full else kind)(f"{what}: {type(error).__name__}: {brief(error, 300)}") from error
    finally:
        timer.cancel()

def gather(text: str) -> list[str]:
    """One text from each process, in rank order. A peer inside an Orbax call would pair it with Orbax's own barrier."""
    row = np.frombuffer(text.encode().ljust(GATHER_BYTES, b"\0"), np.uint8)
    with phase("waiting for the other processes"):
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(row)]

def variants(texts: list[str]) -> dict[str, str]:
    """Each distinct text with the processes that sent it."""
    return {text: "process " + ",".join(str(rank) for rank, other in enumerate(texts) if other == text)
            for text in dict.fromkeys(texts)}

@contextlib.contextmanager
def together() -> Iterator[None]:
    """Checks of our own, on every process: what stops one stops all, with the same line."""
    verdict = ""
    try:
        yield
    except (Refused, Failed) as problem:
        verdict = f"{type(problem).__name__} {problem}"
    for text, processes in variants(gather(verdict)).items():
        if text:
            kind, _, line = text.partition(" ")
            raise {"Refused": Refused, "Failed": Failed}[kind](line + f" ({processes})" * MULTIPROCESS)

def alike(field: str, values: list[str]) -> None:
    """Refuse on every process, naming each one's value, unless all are equal."""
    if len(found := variants(values)) > 1:
        raise Refused(f"{field} must be the same on all processes, but is "
                      + ", ".join(f"{value} on {processes}" for value, processes in found.items()))

def join_group() -> None:
    """Bring up the runtime, and agree on all that could make the processes take different branches."""
    what = "joining the group that Cloud TPU, Slurm or Open MPI has started"
    with phase(what, Refused, START_SECONDS):
        if MULTIPROCESS:
            try:
                jax.distributed.initialize(
                    initialization_timeout=2 * START_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                    shutdown_timeout_seconds=PHASE_SECONDS)
            except Exception as error:  # no launcher, or a port in use: the address says which
                raise Refused(f"{what}: {brief(error, 300)}{place()[1]}") from error
            LISTENER.start()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX's preemption notifier would swallow it
        counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1 or counts.total() < 2:
        raise Refused(f"devices per process {sorted(counts.items())}: 2 or more in all, as many on each process")
    with open(__file__, "rb") as script:
        mine = {"refusal": REFUSAL, "COURSE_RESUME": RESUME, "COURSE_CHECKPOINT_DIR": FOLDER,
                "COURSE_EVIDENCE_DIR": EVIDENCE, **RECIPE, **VERSIONS, "script": digest(script.read())[:12]}
    everyone = [json.loads(text) for text in gather(json.dumps(mine, ensure_ascii=False))]
    for field in mine:
        alike(field, [repr(settings[field]) for settings in everyone])
    if REFUSAL:
        raise Refused(REFUSAL)

# ---- Fixture and placement ----

@functools.cache
def sharding(*axes: str) -> NamedSharding:
    """Replicated, or with rows sharded over the one mesh axis, `data`, of all D devices."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec(*axes))

@functools.cache
def data() -> tuple[np.ndarray, np.ndarray]:
    """float32 examples [4D, 2D] and targets [4D]."""
    examples, width = EXAMPLES_PER_DEVICE * jax.device_count(), WIDTH_PER_DEVICE * jax.device_count()
    rows = np.random.default_rng(DATA_SEED).normal(size=(examples, width)).astype(np.float32)
    return rows, rows @ np.linspace(*TRUE_WEIGHTS, width, dtype=np.float32)

@functools.cache
def spec() -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf of the state, all replicated."""
    examples, width = data()[0].shape
    return {leaf: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding()) for leaf, shape, dtype in (
        ("weights", (width,), "float32"), ("momentum", (width,), "float32"), ("key", (2,), "uint32"),
        ("order", (examples,), "int32"), ("cursor", (), "int32"), ("step", (), "int32"))}

def put(value: Any, *axes: str) -> jax.Array:
    """Place a host value that all processes hold; device_put would start a collective to compare them."""
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding(*axes), lambda index: value[index])

def host(leaf: jax.Array) -> np.ndarray:
    return np.asarray(leaf.addressable_data(0))

def replicas(leaf: jax.Array) -> list[np.ndarray]:
    """Every addressable replica; np.asarray(leaf) would show the first alone."""
    return [np.asarray(shard.data) for shard in leaf.addressable_shards]

# ---- State and transition ----

State = dict[str, jax.Array]  # the leaves of spec()

class Update(NamedTuple):
    ids: list[int]
    loss: float  # of these ids, before the update
    state: State  # after it

def seed_key(seed: int) -> np.ndarray:
    """uint32 [2]: the raw threefry2x32 key that jax.random.PRNGKey(seed) returns, without compiling for it."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)

@functools.partial(jax.jit, static_argnums=1)
def new_epoch(key: np.ndarray, examples: int) -> tuple[jax.Array, jax.Array]:
    """Split `key`, uint32 [2]: the next key, and the int32 [examples] order drawn from the other half."""
    key, shuffle_key = jax.random.split(key)
    return key, jax.random.permutation(shuffle_key, examples)

@jax.jit
def update(weights: jax.Array, momentum: jax.Array, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    """float32 weights w, momentum v [2D], inputs x [2D, 2D], targets y [2D] -> (w', v', loss before the update):
    loss = mean((x w - y)^2), v' = MOMENTUM v + dloss/dw, w' = w - LEARNING_RATE v' (Polyak's heavy ball, 1964)."""
    def loss_of(weights: jax.Array) -> jax.Array:
        # A TPU by default multiplies float32 in bfloat16 passes, which cannot meet RTOL.
        return jnp.mean((jnp.matmul(inputs, weights, precision=jax.lax.Precision.HIGHEST) - targets) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    momentum = MOMENTUM * momentum + gradient
    return weights - LEARNING_RATE * momentum, momentum, loss

def initial_state() -> State:
    key, order = new_epoch(seed_key(KEY_SEED), EXAMPLES_PER_DEVICE * jax.device_count())
    zeros = {leaf: put(np.zeros(like.shape, like.dtype)) for leaf, like in spec().items()}
    return {**zeros, "key": put(key), "order": put(order)}

@phase("an update")
def transition(state: State) -> Update:
    """One update on the next batch; a used-up order is first drawn anew from the key."""
    key, order, cursor, step = state["key"], state["order"], int(host(state["cursor"])), int(host(state["step"]))
    if cursor == order.size:
        key, order = map(put, new_epoch(host(key), order.size))
        cursor = 0
    ids = host(order)[cursor : (cursor := cursor + BATCH_PER_DEVICE * jax.device_count())]
    inputs, targets = (put(rows[ids], "data") for rows in data())
    weights, momentum, loss = update(state["weights"], state["momentum"], inputs, targets)
    return Update(ids.tolist(), float(host(loss)), {
        "weights": weights, "momentum": momentum, "key": key, "order": order,
        "cursor": put(np.int32(cursor)), "step": put(np.int32(step + 1))})

def replay(point: Update, updates: int) -> list[Update]:
    """The recovery point, then the updates from its state on."""
    run = [point]
    for _ in range(updates):
        run.append(transition(run[-1].state))
    return run

# ---- Independent arithmetic and comparison ----

def equal(wanted: Any, got: Any) -> bool:
    """Same dtype and shape; floats within RTOL and ATOL, integers exactly."""
    wanted, got = np.asarray(wanted), np.asarray(got)
    if (wanted.dtype, wanted.shape) != (got.dtype, got.shape):
        return False
    return wanted.tobytes() == got.tobytes() or wanted.dtype.kind == "f" and np.allclose(got, wanted, RTOL, ATOL)

def differences(wanted: list[Update], got: list[Update], *leaves: str) -> Iterator[tuple[str, int, Any, Any]]:
    """(sign, local replicas that show it, wanted, got) wherever two runs differ in ids, loss or leaves, in order."""
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        pairs = {"ids": (one.ids, [other.ids] * jax.local_device_count()),
                 "loss": (one.loss, [other.loss] * jax.local_device_count()),
                 **{leaf: (host(one.state[leaf]), replicas(other.state[leaf])) for leaf in leaves}}
        for what, (value, others) in pairs.items():
            kinds = {np.asarray(other).tobytes(): other for other in others}  # one comparison for all equal replicas
            if unlike := [kind for kind, other in kinds.items() if not equal(value, other)]:
                count = sum(np.asarray(other).tobytes() in unlike for other in others)
                yield f"{what} at update {number}", count, value, kinds[unlike[0]]

def check_equal(wanted: list[Update], got: list[Update]) -> None:
    for sign, _, one, other in differences(wanted, got, *spec()):
        raise Failed(f"{sign}, after the restart: wanted {brief(one)}, got {brief(other)}")

def check_arithmetic(before: State, run: list[Update]) -> None:
    """Each update once more, in float64 NumPy with the derivative 2/n x.T (x w - y) written out: no code shared."""
    for number, (ids, loss, after) in enumerate(run):
        x, y = (rows[ids].astype(float) for rows in data())
        error = x @ host(before["weights"]) - y
        momentum = MOMENTUM * host(before["momentum"]) + 2 / len(ids) * x.T @ error
        weights = host(before["weights"]) - LEARNING_RATE * momentum
        for what, wanted, got in (("loss", np.mean(error**2), loss), ("momentum", momentum, host(after["momentum"])),
                                  ("weights", weights, host(after["weights"]))):
            if not equal(wanted, np.asarray(got, float)):
                raise Failed(f"{what} at update {number}, by independent arithmetic:"
                             f" wanted {brief(wanted)}, got {brief(got)}")
        before = after

# ---- Recovery point: save, wait, restore, verify, accept ----

REFUSALS = {  # (step-one exists, accepted.json exists, resume)
    (False, False, True): "nothing to resume: run a first pass, without COURSE_RESUME",
    (True, False, False): "step-one was saved but never accepted: use a new folder",
    (True, False, True): "step-one was never accepted: run a first pass in a new folder",
    (True, True, False): "holds an accepted checkpoint: use a new folder, or COURSE_RESUME=1 to resume",
    (False, True, False): "holds a manifest without its checkpoint: use a new folder",
    (False, True, True): "the accepted checkpoint step-one is missing: bring it back, or start over in a new folder",
}

def digest(value: Any) -> str:
    """SHA-256 of bytes, or of the canonical JSON of anything else."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()

def contract() -> dict[str, Any]:
    """What a manifest must say for this run to resume; without the targets, whose last bits depend on the BLAS."""
    devices = jax.device_count()
    return {"format": 1, "drill": "distributed-04", "step": 1, "cursor": BATCH_PER_DEVICE * devices, "devices": devices,
            "recipe": RECIPE, "data_sha256": digest(data()[0].tobytes())}

def digests(state: State) -> dict[str, str]:
    return {leaf: digest(host(array).tobytes()) for leaf, array in state.items()}

def check_bytes(state: State, wanted: dict[str, str]) -> None:
    """Every replica has the digested bytes; raises Failed, naming the first leaf that has not."""
    for leaf, array in state.items():
        for value in replicas(array):
            if (got := digest(value.tobytes())) != wanted[leaf]:
                raise Failed(f"{leaf}, restored: wanted sha256 {wanted[leaf][:12]}, got {got[:12]}: {brief(value, 40)}")

def publish(path: epath.Path, text: str) -> None:
    """Write a file whole or not at all, durably: readers and a power cut meet the old folder or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if str(path).startswith("gs://"):
        path.write_text(text)  # one object write is atomic
        return
    try:
        with open(temporary := f"{path}.{os.getpid()}", "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    os.fsync(parent := os.open(path.parent, os.O_RDONLY))
    os.close(parent)

def share(path: epath.Path, text: str, kind: type[Exception]) -> None:
    """Process 0 publishes a file; every process must come to read it, or the folder is not shared."""
    with together(), phase(f"{path.parent} cannot be written, choose another COURSE_CHECKPOINT_DIR", kind):
        if jax.process_index() == 0:
            publish(path, text)
    with together(), phase(f"{path.parent} is not shared: what process 0 wrote there cannot be read", kind):
        deadline = time.monotonic() + SHARE_SECONDS
        while not path.exists() and time.monotonic() < deadline:  # a network file system may take a moment
            time.sleep(0.02)
        if path.read_text() != text:
            raise ValueError("other content")

def restore_verified(folder: epath.Path, wanted: dict[str, str]) -> State:
    """Restore step-one into explicit shardings and compare every replica with its digest; raises Failed.

    Stored shapes and dtypes are compared first: Orbax casts to the target's without a word."""
    def described(tree: Any) -> dict[str, str]:
        return {jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {list(leaf.shape)}"
                for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    with ocp.StandardCheckpointer() as checkpointer:
        with together():
            with phase("step-one, read by Orbax"):
                metadata = checkpointer.metadata(folder / "step-one").item_metadata
                stored = described(metadata.tree if metadata else spec())  # of damage, restore has more to say
            for leaf in (like := described(spec())) | stored:
                if like.get(leaf) != stored.get(leaf):
                    raise Failed(f"{leaf}, as stored: wanted {like.get(leaf)}, got {stored.get(leaf)}")
        with phase("step-one, restored by Orbax"):
            restored = checkpointer.restore(folder / "step-one", spec())
            if not metadata:
                raise Failed("step-one, as stored: wanted shapes and dtypes, got no metadata that Orbax can read")
    with together():
        check_bytes(restored, wanted)
    return restored

def save_accepted(folder: epath.Path, state: State) -> State:
    """Save, wait, restore, verify, and only then accept. Raises Refused (storage) or Failed."""
    token = folder / f"probe-{gather(os.urandom(8).hex())[0]}"
    try:
        share(token, token.name, Refused)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # one left behind harms nobody
                token.unlink()
    with together():
        if jax.process_index() == 0 and not str(folder).startswith("gs://"):
            try:  # two saves at once delete each other's files; the lock ends with this process and leaves nothing
                fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(f"{folder}: another first pass is saving there: use a new folder") from None
            except OSError:
                pass  # a file system without locks: whoever loses is stopped by Orbax or by the digests
    with phase("step-one, saved by Orbax"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step-one", state)
        checkpointer.wait_until_finished()  # save returns before the bytes are committed
    restored = restore_verified(folder, digests(state))  # every process by its own digests: all agree, or all stop
    manifest = {
        **contract(), "saved_by": {**VERSIONS, "backend": jax.default_backend(), "processes": jax.process_count()},
        "leaves": {leaf: {"shape": state[leaf].shape, "dtype": str(state[leaf].dtype), "sha256": sha256}
                   for leaf, sha256 in digests(state).items()}}
    share(folder / "accepted.json", json.dumps({**manifest, "sha256": digest(manifest)}, indent=1), Failed)
    return restored

def load_accepted(folder: epath.Path | str) -> State:
    """The state of an accepted checkpoint, verified against its manifest; writes nothing.

    Raises Refused (manifest unreadable, changed or of another contract) or Failed (step-one is not what it says)."""
    path = epath.Path(folder) / "accepted.json"
    with together(), phase(f"{path} is not a manifest: bring the original back, or use a new folder", Refused):
        manifest = json.loads(path.read_text())
        if manifest.pop("sha256") != digest(manifest):
            raise Refused(f"{path}: its own sha256 does not fit: changed after acceptance, bring the original back")
        wanted = {"devices": jax.device_count(), **RECIPE, **contract(),
                  **{f"leaf {leaf}": [like.shape, str(like.dtype)] for leaf, like in spec().items()}}
        got = {**manifest["recipe"], **manifest,
               **{f"leaf {leaf}": [entry["shape"], entry["dtype"]] for leaf, entry in manifest["leaves"].items()}}
        for field in wanted:
            if digest(wanted[field]) != digest(got.get(field)):
                raise Refused(f"{path}: {field}: wanted {brief(wanted[field])}, got {brief(got.get(field))}:"
                              " resume with the script and devices that saved it, or use a new folder")
        accepted = {leaf: str(entry["sha256"]) for leaf, entry in manifest["leaves"].items()}
    alike("accepted.json", gather(digest(manifest)[:12]))
    return restore_verified(path.parent, accepted)

# ---- Injected faults: where each must show first ----

def on_last_device(leaf: jax.Array) -> jax.Array:
    """The leaf with another value in the replica on the last device alone."""
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [
        jax.device_put(np.asarray(shard.data) + (shard.device == jax.devices()[-1]), shard.device)
        for shard in leaf.addressable_shards])

def inject(here: State, later: State) -> dict[str, tuple[str, jax.Array, str, str]]:
    """Fault: leaf, its value instead, predicted first sign in a replay, predicted first loss that differs."""
    return {
        "weights lost": ("weights", put(0 * host(here["weights"])), "loss at update 1", "update 1"),
        "momentum lost": ("momentum", put(0 * host(here["momentum"])), "weights at update 1", "update 2"),
        "wrong key": ("key", put(seed_key(WRONG_KEY_SEED)), "ids at update 2", "update 2"),
        "order reversed": ("order", put(host(here["order"])[::-1]), "ids at update 1", "update 1"),
        "cursor reset": ("cursor", put(np.int32(0)), "ids at update 1", "update 1"),
        "step reset": ("step", put(np.int32(0)), "counter only", "never"),
        "mixed steps": ("momentum", later["momentum"], "weights at update 1", "update 2"),
        "one replica": ("momentum", on_last_device(here["momentum"]), "one replica's weights at update 1", "update 2"),
    }

def diagnose(reference: list[Update]) -> tuple[list[str], dict[str, list[Update]]]:
    """The diagnosis table and the faulty runs; raises Failed unless each fault shows exactly where predicted."""
    here, later, last = reference[0].state, reference[1].state, len(reference) - 1
    watched = [f"{what} at update {number}" for number in range(1, last + 1) for what in ("ids", "loss", "weights")]
    watched.append(f"step at update {last}")
    faults, runs, mine = inject(here, later), {}, {}
    for fault, (leaf, value, _, _) in faults.items():
        faulty, refused = {**here, leaf: value}, ""
        try:
            check_bytes(faulty, digests(here))
        except Failed as failure:
            refused = str(failure).split(",")[0]
        runs[fault] = replay(reference[0]._replace(state=faulty), last)
        shown = differences(reference, runs[fault], "weights", "step")
        mine[fault] = refused, {sign: count for sign, count, _, _ in shown if sign in watched}
    everyone = [json.loads(text) for text in gather(json.dumps(mine))]
    table = [f"{'injected fault':16}{'digest':10}{'predicted in a replay':34}{'observed in the replay':34}loss alone"]
    for fault, (leaf, _, predicted, loss) in faults.items():
        refused = max(process[fault][0] for process in everyone)
        count = {sign: sum(process[fault][1].get(sign, 0) for process in everyone) for sign in watched}
        first = next((sign for sign in watched if count[sign]), "nothing")
        observed = "counter only" if first == watched[-1] else first
        if 0 < count.get(first, 0) < jax.device_count():
            observed = f"one replica's {first}"
        alone = next((sign[8:] for sign in watched if count[sign] and sign.startswith("loss")), "never")
        if (refused, observed, alone) != (leaf, predicted, loss):
            raise Failed(f"{fault}, injected: wanted {(leaf, predicted, loss)}, got {(refused, observed, alone)}")
        table.append(f"{fault:16}{refused:10}{predicted:34}{observed:34}{alone}")
    return table, runs

# ---- Report and protocol ----

REPORT = f"distributed-04-{'resume' if RESUME else 'first-pass'}.json"

def write_evidence(folder: epath.Path, saved: State, runs: dict[str, list[Update]], table: list[str]) -> None:
    """The JSON report, and the figure where matplotlib is installed."""
    restored, evidence = runs["restored"][0].state, epath.Path(EVIDENCE)
    figure = {"kind": "line", "x": list(range(1, REPLAY_STEPS + 1)),
              "xlabel": "update after checkpoint", "ylabel": "batch mean squared loss",
              "series": {name: [update.loss for update in runs[name][1 : REPLAY_STEPS + 1]]
                         for name in ("uninterrupted", "restored", "momentum lost", "wrong key")}}
    if importlib.util.find_spec("matplotlib"):
        import matplotlib.figure
        matplotlib.rcParams["svg.hashsalt"] = "distributed-04"  # the same drawing is the same file
        drawing = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
        axes = drawing.add_subplot(xlabel=figure["xlabel"], ylabel=figure["ylabel"], xticks=figure["x"])
        for (name, losses), style in zip(figure["series"].items(), ("o-", "x--", "s:", "^:"), strict=True):
            axes.plot(figure["x"], losses, style, label=name, markersize=9 if style == "o-" else 6)
        axes.legend()
        drawing.savefig(svg := io.StringIO(), format="svg", metadata={"Date": None})
        publish(evidence / "distributed-04.svg", svg.getvalue())
    publish(evidence / REPORT, json.dumps({
        "verdict": "PASS", "versions": VERSIONS, "backend": jax.default_backend(), "processes": jax.process_count(),
        "checkpoint": str(folder / "step-one"), "contract": contract(), "digests": digests(restored),
        "saved": {leaf: host(array).tolist() for leaf, array in saved.items()},
        "restored": {leaf: host(array).tolist() for leaf, array in restored.items()},
        "runs": {name: {"ids": [update.ids for update in run[1:]], "losses": [update.loss for update in run[1:]]}
                 for name, run in runs.items()},
        "diagnosis": table, "figure": figure, "not_tested": [
            "several hosts: their network, their clocks, the storage between them", "accelerators other than backend",
            "any other training job: its state, data pipeline and optimizer"]}, indent=1))

def drill() -> list[str]:
    """The protocol; returns the report. Raises Refused or Failed."""
    join_group()
    with together():
        with phase(f"{FOLDER} cannot be read", Refused):
            folder = epath.Path(FOLDER)
            found = (folder / "step-one").exists(), (folder / "accepted.json").exists(), RESUME
        if found in REFUSALS:
            raise Refused(f"{folder}: {REFUSALS[found]}")
        with phase(f"COURSE_EVIDENCE_DIR={EVIDENCE} cannot be written, choose another", Refused):
            if EVIDENCE and jax.process_index() == 0:
                publish(epath.Path(EVIDENCE) / REPORT, '{"verdict": "unfinished"}')
    start = initial_state()
    point = transition(start)
    restored = load_accepted(folder) if RESUME else save_accepted(folder, point.state)
    again, updates = point._replace(state=restored), REPLAY_STEPS + EXTRA_STEPS
    with together():
        check_equal([point], [again])
    uninterrupted, resumed = replay(point, updates), replay(again, updates)
    with together():
        check_equal(uninterrupted, resumed)
        check_arithmetic(start, resumed)
    table, faulty = diagnose(uninterrupted[: REPLAY_STEPS + 1])
    drift = np.abs(host(faulty["momentum lost"][1].state["weights"]) - host(uninterrupted[1].state["weights"])).max()
    report = [
        f"Recorded backend/processes/devices: {jax.default_backend()} {jax.process_count()} {jax.device_count()}",
        f"Restored step/cursor: {host(restored['step'])} {host(restored['cursor'])}",
        f"Next sample IDs across epoch boundary: {[update.ids for update in resumed[1 : REPLAY_STEPS + 1]]}",
        f"Uninterrupted losses: {[update.loss for update in uninterrupted[1 : REPLAY_STEPS + 1]]}",
        f"Restored losses: {[update.loss for update in resumed[1 : REPLAY_STEPS + 1]]}",
        f"Checkpoint: {folder / 'step-one'}",
        f"Same next sample IDs, different weights after missing momentum: {drift}",
        *table,
        "Five resumed transitions and all addressable parameter replicas agree.",
        "Current-epoch batch matches; next-epoch batch exposes the wrong key.",
        "PASS: distributed-04" + (
            " (one process: not multi-controller evidence)" if MULTIPROCESS and jax.process_count() == 1 else "")]
    with together(), phase(f"evidence in {EVIDENCE}"):
        if EVIDENCE and jax.process_index() == 0:
            write_evidence(folder, point.state, {"uninterrupted": uninterrupted, "restored": resumed, **faulty}, table)
    with phase("waiting for all processes to leave"):
        jax.distributed.shutdown()  # no process prints PASS before every process has reached this line
    return report

def main() -> NoReturn:
    try:
        leave(0, drill())
    except Refused as refusal:
        leave(2, [], str(refusal))
    except Failed as failure:
        leave(1, [f"FAIL: distributed-04: {failure}"], f"look in {FOLDER}")
    except Exception:
        leave(1, [], traceback.format_exc())

if __name__ == "__main__":
    main()
