# /// script
# requires-python = ">=3.11"
# dependencies = ["jax>=0.9.2", "orbax-checkpoint>=0.12.8", "numpy"]
# ///
"""After a restart, does this training computation continue, or does it merely load?

One sharded training step on every device; the complete state saved with Orbax, restored into explicit shardings,
verified, accepted; then the next updates, across an epoch boundary, must equal an uninterrupted run: sample ids,
losses, every leaf, every replica. Last, faults are injected, and each must show where the table below says it shows.

    python distributed_04.py                                                         first pass on 4 logical CPU devices
    COURSE_RESUME=1 COURSE_CHECKPOINT_DIR=DIR python distributed_04.py               resume it in a fresh process
    COURSE_MULTIPROCESS=1 COURSE_CHECKPOINT_DIR=DIR srun python distributed_04.py    every process of a job

COURSE_RESUME          1: restore the accepted checkpoint instead of saving one (0, empty or unset: off)
COURSE_MULTIPROCESS    1: join the group that Cloud TPU, Slurm or Open MPI has started (0, empty or unset: off)
COURSE_CHECKPOINT_DIR  parent of the checkpoint, shared by all processes: a folder, or gs://bucket/prefix (needs gcsfs);
                       unset in a first pass of one process: a new temporary folder
COURSE_EVIDENCE_DIR    optional folder for the JSON report and, where matplotlib is installed, the figure

Exit status: 0, last line `PASS: distributed-04`; 1, `FAIL: distributed-04: ...`, a check failed; 2, refused.
Every wait is bounded: START_SECONDS for all processes to join, PHASE_SECONDS for each later phase, SHARE_SECONDS for a
file to be seen by all. The library's own HEARTBEAT_SECONDS is longer, so that the line you read is ours.

Not claimed: that another job's checkpoint is complete; anything about hardware, network or storage this did not run on;
equal bits in recomputed floats (RTOL, ATOL); protection from someone who rewrites both checkpoint and manifest.
"""
import gc

gc.disable()  # importing JAX makes a million objects that live to the end; walking them is a tenth of the run

import contextlib
import functools
import hashlib
import importlib.util
import json
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
from typing import Any, Callable, Iterator, NamedTuple, NoReturn

class Refused(Exception):
    """The run cannot start as asked: exit status 2."""

class Failed(Exception):
    """A check found a difference, or a library could not do its part: exit status 1."""

# ---- Switches: read once, before the second that importing JAX costs ----

class Settings(NamedTuple):
    multiprocess: bool
    resume: bool = False
    folder: str = ""  # parent of step-one: an absolute path or a gs:// prefix
    evidence: str = ""
    refusal: str = ""  # in a group it waits for the agreement: leaving alone would strand the others

def switch(name: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise Refused(f"{name}={value!r} is not a switch: 1 is on; 0, empty or unset is off")
    return value == "1"

def folder_switch(name: str, remote: bool = False) -> str:
    """Absolute path or gs:// prefix; refuses what Orbax would save to another place than the one meant, or not restore."""
    text = os.environ.get(name, "")
    on_gcs = remote and re.match("gs://[^/]", text)
    if re.search(r"^~|^[A-Za-z][\w+.-]*:/|[][\\]", text) and not on_gcs or not text.isprintable() or len(text) > 1000:
        raise Refused(f"{name}={text!r}: write a folder in full, without ~ [ ] \\" + " or gs://bucket/prefix" * remote)
    if "step-one" in text.split("/"):
        raise Refused(f"{name}={text!r}: give the parent folder of step-one")
    if on_gcs and importlib.util.find_spec("gcsfs") is None:
        raise Refused(f"{name}={text!r} needs a package: pip install gcsfs")
    return text.rstrip("/") if on_gcs else text and os.path.abspath(text)

def read_settings(arguments: list[str]) -> Settings:
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        raise SystemExit(0)
    if arguments:
        raise Refused(f"unknown argument {arguments[0]!r}: the switches are environment variables, see --help")
    multiprocess = switch("COURSE_MULTIPROCESS")
    try:
        resume, folder = switch("COURSE_RESUME"), folder_switch("COURSE_CHECKPOINT_DIR", remote=True)
        if not folder and (resume or multiprocess):
            raise Refused("COURSE_CHECKPOINT_DIR is unset: name the folder that the first pass, all processes and the resume share")
        return Settings(multiprocess, resume, folder, folder_switch("COURSE_EVIDENCE_DIR"))
    except Refused as refusal:
        if not multiprocess:
            raise
        return Settings(multiprocess, refusal=str(refusal))

try:
    SETTINGS = read_settings(sys.argv[1:] if __name__ == "__main__" else [])
except Refused as reason:
    print(f"distributed_04.py: {reason}", file=sys.stderr)
    raise SystemExit(2) from None

# ---- Runtime: nothing in the environment may bend the drill ----

LAUNCH = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT",
          "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS", "JAX_PARTITION_INDEX")
for variable in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
    if not (SETTINGS.multiprocess and variable in LAUNCH):
        del os.environ[variable]  # one changes every id, another every dtype, a third ends in a traceback
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # standard error is for our one line

import logging

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
HEARTBEAT_SECONDS = 25
GATHER_BYTES = 8192

logging.disable(logging.CRITICAL)  # a failed save logs hundreds of lines; what it raises is quoted in one
jax.config.update("jax_default_prng_impl", "threefry2x32")
jax.config.update("jax_threefry_partitionable", True)
jax.config.update("jax_random_seed_offset", 0)
jax.config.update("jax_enable_x64", False)
if not SETTINGS.multiprocess:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
# By default Orbax divides each replicated leaf among its replicas, with two compiled programs a device.
ocp.type_handlers.register_type_handler(
    jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False), override=True)

def leave(status: int, lines: list[str], reason: str = "") -> NoReturn:
    """Print and exit at once: one write a stream keeps a group's lines whole, and Orbax's threads would stay for minutes."""
    joined = multihost_utils.distributed.global_state  # asking the backend for the rank could wait for a peer
    prefix = f"[{joined.process_id}/{joined.num_processes}] " if SETTINGS.multiprocess else ""
    try:
        for stream, texts in ((sys.stdout, lines), (sys.stderr, [f"distributed_04.py: {reason}"] if reason else [])):
            stream.write("".join(f"{prefix}{text}\n" for text in texts))
            stream.flush()
    except OSError:
        status = status or 1  # nobody could read a PASS that was not written
    finally:
        os._exit(status)

def give_up(what: str, seconds: float) -> None:
    joined = multihost_utils.distributed.global_state
    leave(1, [f"FAIL: distributed-04: {what}: waited {seconds} s"],
          f"rank {joined.process_id} of {joined.num_processes} processes, coordinator {joined.coordinator_address}:"
          " a process that never started, died or stopped, or storage that does not answer")

@contextlib.contextmanager
def phase(what: str, kind: type[Exception] = Failed, seconds: float = PHASE_SECONDS) -> Iterator[None]:
    """Bound what may hang, and turn whatever a library raises into one line of `kind`."""
    timer = threading.Timer(seconds, give_up, (what, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (Refused, Failed):
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {brief(error, 300)}") from error
    finally:
        timer.cancel()

def brief(value: Any, length: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[: length - 3] + "..."

def gather(text: str) -> list[str]:
    """One text from each process, in rank order. A peer inside an Orbax call would pair it with Orbax's own barrier."""
    row = np.frombuffer(text.encode().ljust(GATHER_BYTES, b"\0")[:GATHER_BYTES], np.uint8)
    with phase("waiting for the other processes"):
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(row)]

def variants(texts: list[str]) -> dict[str, str]:
    """Each distinct text with the processes that sent it."""
    return {text: "process " + ",".join(str(rank) for rank, other in enumerate(texts) if other == text)
            for text in dict.fromkeys(texts)}

def together(check: Callable[[], Any]) -> Any:
    """Run a check of our own on every process; what stops one stops all, with the same line."""
    result, verdict = None, ""
    try:
        result = check()
    except (Refused, Failed) as problem:
        verdict = f"{type(problem).__name__} {problem}"
    for text, processes in variants(gather(verdict)).items():
        if text:
            kind, _, line = text.partition(" ")
            raise {"Refused": Refused, "Failed": Failed}[kind](line + f" ({processes})" * SETTINGS.multiprocess)
    return result

def join_group() -> None:
    """Bring up the runtime and agree on everything that could make the processes take different branches."""
    with phase("waiting for all processes to join", Refused, START_SECONDS):
        if SETTINGS.multiprocess:
            jax.distributed.initialize(initialization_timeout=2 * START_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                                       shutdown_timeout_seconds=PHASE_SECONDS)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX's preemption notifier would swallow it
        counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1 or counts.total() < 2:
        raise Refused(f"devices per process {sorted(counts.items())}: 2 or more in all, as many on each process")
    with open(__file__, "rb") as script:
        mine = {"COURSE_RESUME": SETTINGS.resume, "COURSE_CHECKPOINT_DIR": SETTINGS.folder, **versions(), **recipe(),
                "script": hashlib.sha256(script.read()).hexdigest()[:12]}
    everyone = [json.loads(text) for text in gather(json.dumps([SETTINGS.refusal, mine], ensure_ascii=False))]
    refusals = [f"{text} ({who})" for text, who in variants([refusal for refusal, _ in everyone]).items() if text]
    differences = [f"{field} is " + ", ".join(f"{value} on {who}" for value, who in found.items())
                   for field in mine if len(found := variants([repr(settings[field]) for _, settings in everyone])) > 1]
    if refusals or differences:
        raise Refused("; ".join(refusals or ["every process must be started alike: " + "; ".join(differences)]))

# ---- Fixture and placement ----

class Fixture(NamedTuple):
    """Fixed inputs for D devices: all state is replicated, batch rows are sharded over the mesh axis `data`."""
    replicated: NamedSharding
    sharded: NamedSharding
    examples: np.ndarray  # float32 [4D, 2D]
    targets: np.ndarray  # float32 [4D]
    spec: dict[str, tuple[tuple[int, ...], str]]  # leaf: shape, dtype

@functools.cache
def fixture() -> Fixture:
    devices = jax.device_count()
    examples, width = EXAMPLES_PER_DEVICE * devices, WIDTH_PER_DEVICE * devices
    mesh = Mesh(np.array(jax.devices()), ("data",))
    data = np.random.default_rng(DATA_SEED).normal(size=(examples, width)).astype(np.float32)
    return Fixture(NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")),
                   data, data @ np.linspace(*TRUE_WEIGHTS, width, dtype=np.float32), {
                       "weights": ((width,), "float32"), "momentum": ((width,), "float32"), "key": ((2,), "uint32"),
                       "order": ((examples,), "int32"), "cursor": ((), "int32"), "step": ((), "int32")})

def put(value: Any, dtype: str, sharding: NamedSharding | None = None) -> jax.Array:
    """Place a host value that all processes hold; device_put would start a collective to compare them."""
    value = np.asarray(value, dtype)
    return jax.make_array_from_callback(value.shape, sharding or fixture().replicated, lambda index: value[index])

def host(leaf: jax.Array) -> np.ndarray:
    """The first addressable replica."""
    return np.asarray(leaf.addressable_data(0))

def replicas(leaf: jax.Array) -> dict[int, np.ndarray]:
    """Every addressable replica, by device id; np.asarray(leaf) would show the first alone."""
    return {shard.device.id: np.asarray(shard.data) for shard in leaf.addressable_shards}

# ---- State and transition ----

State = dict[str, jax.Array]  # the leaves of Fixture.spec

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
    """(w', v', loss before the update), all float32: loss = mean((x w - y)^2), v' = MOMENTUM v + dloss/dw,
    w' = w - LEARNING_RATE v' (heavy-ball momentum, Polyak 1964). weights, momentum [2D]; inputs [2D, 2D]; targets [2D]."""
    def loss_of(weights: jax.Array) -> jax.Array:
        # A TPU by default multiplies float32 in bfloat16 passes, which cannot meet RTOL.
        return jnp.mean((jnp.matmul(inputs, weights, precision=jax.lax.Precision.HIGHEST) - targets) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    momentum = MOMENTUM * momentum + gradient
    return weights - LEARNING_RATE * momentum, momentum, loss

def initial_state() -> State:
    key, order = new_epoch(seed_key(KEY_SEED), EXAMPLES_PER_DEVICE * jax.device_count())
    start = {"key": key, "order": order}
    return {leaf: put(start.get(leaf, np.zeros(shape)), dtype) for leaf, (shape, dtype) in fixture().spec.items()}

class Update(NamedTuple):
    ids: list[int]
    loss: float  # of these ids, before the update
    state: State  # after it

def transition(state: State) -> Update:
    """One update on the next batch; a used-up order is first drawn anew from the key."""
    key, order, cursor, step = state["key"], state["order"], int(host(state["cursor"])), int(host(state["step"]))
    if cursor == order.size:
        new_key, new_order = new_epoch(host(key), order.size)
        key, order, cursor = put(new_key, "uint32"), put(new_order, "int32"), 0
    ids = host(order)[cursor : (cursor := cursor + BATCH_PER_DEVICE * jax.device_count())]
    weights, momentum, loss = update(state["weights"], state["momentum"],
                                     put(fixture().examples[ids], "float32", fixture().sharded),
                                     put(fixture().targets[ids], "float32", fixture().sharded))
    return Update(ids.tolist(), float(host(loss)), {"weights": weights, "momentum": momentum, "key": key, "order": order,
                                                    "cursor": put(cursor, "int32"), "step": put(step + 1, "int32")})

def replay(state: State) -> list[Update]:
    run = [transition(state)]
    while len(run) < REPLAY_STEPS + EXTRA_STEPS:
        run.append(transition(run[-1].state))
    return run

# ---- Independent arithmetic and comparison ----

def equal(wanted: Any, got: Any) -> bool:
    """Same dtype and shape; floats within RTOL and ATOL, integers exactly."""
    wanted, got = np.asarray(wanted), np.asarray(got)
    alike = (wanted.dtype, wanted.shape) == (got.dtype, got.shape)
    return alike and (np.allclose(got, wanted, RTOL, ATOL) if wanted.dtype.kind == "f" else np.array_equal(wanted, got))

def check(what: str, when: str, wanted: Any, got: Any) -> None:
    if not equal(wanted, got):
        raise Failed(f"{what}, {when}: wanted {brief(wanted)}, got {brief(got)}")

def check_state(when: str, wanted: State, got: State) -> None:
    for leaf in fixture().spec:
        for device, value in replicas(got[leaf]).items():
            check(f"{leaf} on device {device}", when, host(wanted[leaf]), value)

def check_arithmetic(run: str, before: State, runs: list[Update]) -> None:
    """Each update once more, in float64 NumPy with the derivative 2/n x.T (x w - y) written out: no code shared."""
    for number, (ids, loss, after) in enumerate(runs, 1):
        x, y = fixture().examples[ids].astype(np.float64), fixture().targets[ids].astype(np.float64)
        error = x @ host(before["weights"]) - y
        momentum = MOMENTUM * host(before["momentum"]) + 2 / len(ids) * x.T @ error
        weights = host(before["weights"]) - LEARNING_RATE * momentum
        for name, wanted, got in (("loss", np.mean(error**2), np.float64(loss)),
                                  ("momentum", momentum, host(after["momentum"]).astype(np.float64)),
                                  ("weights", weights, host(after["weights"]).astype(np.float64))):
            check(f"{name} by independent arithmetic", f"{run} update {number}", wanted, got)
        before = after

# ---- Recovery point: save, wait, restore, verify, accept ----

REFUSALS = {  # (step-one exists, accepted.json exists, resume)
    (False, False, True): "nothing to resume: run a first pass, without COURSE_RESUME",
    (True, False, False): "step-one was saved but never accepted: use a new folder",
    (True, False, True): "step-one was never accepted: run a first pass in a new folder",
    (True, True, False): "holds an accepted checkpoint: use a new folder, or COURSE_RESUME=1 to resume",
    (False, True, False): "holds a manifest without its checkpoint: use a new folder",
    (False, True, True): "the accepted checkpoint step-one is missing: bring it back, or run a first pass in a new folder",
}

def digest(value: Any) -> str:
    """SHA-256 of bytes, or of the canonical JSON of anything else."""
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()

def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "orbax-checkpoint": ocp.__version__, "numpy": np.__version__,
            "python": platform.python_version()}

def recipe() -> dict[str, Any]:
    """Every constant that changes the numbers."""
    return {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "prng": "threefry2x32 partitionable",
            "data_seed": DATA_SEED, "key_seed": KEY_SEED, "true_weights": list(TRUE_WEIGHTS),
            "examples_per_device": EXAMPLES_PER_DEVICE, "batch_per_device": BATCH_PER_DEVICE, "width_per_device": WIDTH_PER_DEVICE}

def contract() -> dict[str, Any]:
    """What a manifest must say for this run to resume from it. The targets' last bits depend on the BLAS: not digested."""
    devices = jax.device_count()
    return {"format": 1, "drill": "distributed-04", "step": 1, "cursor": BATCH_PER_DEVICE * devices, "devices": devices,
            "recipe": recipe(), "data_sha256": digest(fixture().examples.tobytes())}

def look_up(folder: epath.Path) -> None:
    with phase(f"{folder} cannot be read", Refused):
        found = (folder / "step-one").exists(), (folder / "accepted.json").exists(), SETTINGS.resume
    if found in REFUSALS:
        raise Refused(f"{folder}: {REFUSALS[found]}")

def publish(path: epath.Path, text: str, kind: type[Exception] = Failed) -> None:
    """Write a file whole or not at all, durably: readers and a power cut meet the old folder or the new file."""
    with phase(f"{path} cannot be written", kind):
        path.parent.mkdir(parents=True, exist_ok=True)
        if str(path).startswith("gs://"):
            path.write_text(text)  # one object write is atomic
            return
        temporary = f"{path}.{os.getpid()}"
        with open(temporary, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        parent = os.open(path.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)

def share(path: epath.Path, text: str, kind: type[Exception]) -> None:
    """Process 0 publishes a file; every process must come to read it, or the folder is not shared."""
    def appears() -> None:
        deadline, got = time.monotonic() + SHARE_SECONDS, ""
        while got != text:
            if time.monotonic() > deadline:
                raise kind(f"shared storage, {path}: wanted what process 0 wrote, got {brief(got)}")
            try:
                got = path.read_text()
            except OSError as error:
                got = type(error).__name__
            time.sleep(0.02 if got != text else 0)

    together(lambda: jax.process_index() == 0 and publish(path, text, kind))
    together(appears)

def save_accepted(folder: epath.Path, state: State) -> State:
    """Save, wait, restore, verify, and only then accept."""
    token = folder / f"probe-{gather(os.urandom(8).hex())[0]}"
    share(token, token.name, Refused)
    if jax.process_index() == 0:
        token.unlink()
    leaves = {leaf: {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": digest(host(array).tobytes())}
              for leaf, array in state.items()}
    for leaf, entry in leaves.items():
        if len(found := variants(gather(entry["sha256"]))) > 1:
            raise Failed(f"{leaf}, before saving: wanted equal bytes on all processes, got {found}")
    with phase("step-one, saved by Orbax"), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step-one", state)
        checkpointer.wait_until_finished()  # save returns before the bytes are committed
    restored = restore_verified(folder, {leaf: entry["sha256"] for leaf, entry in leaves.items()})
    manifest = {**contract(), "leaves": leaves, "saved_by": {
        **versions(), "backend": jax.default_backend(), "processes": jax.process_count()}}
    share(folder / "accepted.json", json.dumps({**manifest, "sha256": digest(manifest)}, indent=1) + "\n", Failed)
    return restored

def restore_verified(folder: epath.Path, digests: dict[str, str]) -> State:
    """Restore step-one into explicit shardings; raises Failed unless every replica has the digested bytes.

    Stored shapes and dtypes are compared first: Orbax casts to the target's without a word."""
    spec = fixture().spec
    def check_stored() -> None:
        stored = {jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {list(leaf.shape)}"
                  for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        wanted = {leaf: f"{dtype} {list(shape)}" for leaf, (shape, dtype) in spec.items()}
        for leaf in wanted | stored:
            if wanted.get(leaf) != stored.get(leaf):
                raise Failed(f"{leaf}, as stored: wanted {wanted.get(leaf)}, got {stored.get(leaf)}")

    def check_bytes() -> None:
        for leaf, array in restored.items():
            for value in replicas(array).values():
                if digest(value.tobytes()) != digests.get(leaf):
                    raise Failed(f"{leaf}, restored: wanted the accepted sha256 {brief(digests.get(leaf), 15)},"
                                 f" got {brief(digest(value.tobytes()), 15)} {brief(value)}")

    with ocp.StandardCheckpointer() as checkpointer:
        with phase("step-one, read by Orbax"):
            tree = checkpointer.metadata(folder / "step-one").item_metadata.tree
        together(check_stored)
        with phase("step-one, restored by Orbax"):
            restored = checkpointer.restore(folder / "step-one", {
                leaf: jax.ShapeDtypeStruct(shape, dtype, sharding=fixture().replicated) for leaf, (shape, dtype) in spec.items()})
    together(check_bytes)
    return restored

def load_accepted(folder: epath.Path | str) -> State:
    """The state of an accepted checkpoint, verified against its manifest; writes nothing.

    Raises Refused (manifest unreadable, changed or of another contract) or Failed (step-one is not what it says)."""
    path = epath.Path(folder) / "accepted.json"
    def read_manifest() -> dict[str, Any]:
        with phase(f"{path} is not a manifest", Refused):
            manifest = json.loads(path.read_text())
            if manifest.pop("sha256") != digest(manifest):
                raise Refused(f"{path}: its own sha256 does not fit: it was changed after acceptance")
            manifest["leaves"] = {leaf: entry["sha256"] for leaf, entry in manifest["leaves"].items()}
        for field, wanted in contract().items():
            if digest(manifest.get(field)) != digest(wanted):
                raise Refused(f"{path}: {field}: wanted {brief(wanted)}, got {brief(manifest.get(field))}: resume with the settings it was saved with")
        return manifest

    manifest = together(read_manifest)
    if len(found := variants(gather(digest(manifest)))) > 1:
        raise Refused(f"{path}: wanted one manifest on all processes, got {found}")
    return restore_verified(path.parent, manifest["leaves"])

# ---- Injected faults: where each must show first ----

def one_replica(leaf: jax.Array) -> jax.Array:
    """The leaf with another value on the last device alone."""
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [
        jax.device_put(np.asarray(shard.data) + (shard.device == jax.devices()[-1]), shard.device)
        for shard in leaf.addressable_shards])

FAULTS = {  # name: (leaf, its value from the recovery point and the state one update later, first sign, loss alone)
    "weights lost": ("weights", lambda at, later: put(0 * host(at["weights"]), "float32"), "loss differs at update 1", "update 1"),
    "momentum lost": ("momentum", lambda at, later: put(0 * host(at["momentum"]), "float32"), "weights differ after update 1", "update 2"),
    "wrong key": ("key", lambda at, later: put(seed_key(WRONG_KEY_SEED), "uint32"), "ids differ at update 2", "update 2"),
    "order reversed": ("order", lambda at, later: put(host(at["order"])[::-1], "int32"), "ids differ at update 1", "update 1"),
    "cursor reset": ("cursor", lambda at, later: put(0, "int32"), "ids differ at update 1", "update 1"),
    "step reset": ("step", lambda at, later: put(0, "int32"), "counter only", "never"),
    "mixed steps": ("momentum", lambda at, later: later["momentum"], "weights differ after update 1", "update 2"),
    "one replica": ("momentum", lambda at, later: one_replica(at["momentum"]), "only the replica comparison after update 1", "update 2"),
}

def signs(wanted: list[Update], got: list[Update]) -> dict[str, int]:
    """On how many local replicas each sign shows, in the order of the run."""
    def differing(leaf: str, one: Update, other: Update) -> int:
        return sum(not equal(host(one.state[leaf]), value) for value in replicas(other.state[leaf]).values())

    found, local = {}, jax.local_device_count()
    for number, (one, other) in enumerate(zip(wanted, got, strict=True), 1):
        found[f"ids differ at update {number}"] = local * (one.ids != other.ids)
        found[f"loss differs at update {number}"] = local * (not equal(one.loss, other.loss))
        found[f"weights differ after update {number}"] = differing("weights", one, other)
    return found | {"counter only": differing("step", wanted[-1], got[-1])}

def diagnose(at: State, reference: list[Update]) -> tuple[list[str], dict[str, list[Update]]]:
    """Run every fault; raises Failed unless the manifest would refuse it and it shows exactly where predicted."""
    runs = {name: replay({**at, leaf: value(at, reference[0].state)}) for name, (leaf, value, *_) in FAULTS.items()}
    mine = {name: signs(reference, run) for name, run in runs.items()}
    everyone = [json.loads(text) for text in gather(json.dumps(mine))]
    rows = [f"{'fault':16}{'predicted':44}{'observed':44}loss alone"]
    for name, (leaf, value, predicted, loss_alone) in FAULTS.items():
        shown = [(sign, sum(process[name][sign] for process in everyone)) for sign in mine[name]]
        first, count = next(((sign, count) for sign, count in shown if count), ("nothing", 0))
        if 0 < count < jax.device_count():
            first = f"only the replica comparison {first[-14:]}"
        loss = next((sign[-8:] for sign, count in shown if count and sign.startswith("loss")), "never")
        rows.append(f"{name:16}{predicted:44}{first:44}{loss}")
        if (first, loss) != (predicted, loss_alone):
            raise Failed(f"fault {name}, in the replay: wanted {predicted}, loss {loss_alone}; got {first}, loss {loss}")
    return rows, runs

# ---- Report ----

def write_evidence(folder: epath.Path, saved: State, restored: State, runs: dict[str, list[Update]], rows: list[str]) -> None:
    def values(state: State) -> dict[str, Any]:
        return {leaf: host(array).tolist() for leaf, array in state.items()}

    series = {name: [update.loss for update in runs[name]] for name in ("uninterrupted", "restored", "momentum lost", "wrong key")}
    figure = {"kind": "line", "x": list(range(1, len(runs["restored"]) + 1)), "xlabel": "update after checkpoint",
              "ylabel": "batch mean squared loss", "series": series}
    evidence = epath.Path(SETTINGS.evidence)
    publish(evidence / f"distributed-04-{'resume' if SETTINGS.resume else 'first-pass'}.json", json.dumps({
        "versions": versions(), "backend": jax.default_backend(), "processes": jax.process_count(), "devices": jax.device_count(),
        "checkpoint": str(folder / "step-one"), "contract": contract(),
        "saved": values(saved), "restored": values(restored),
        "digests": {leaf: digest(host(array).tobytes()) for leaf, array in restored.items()},
        "runs": {name: {"ids": [u.ids for u in run], "losses": [u.loss for u in run]} for name, run in runs.items()},
        "diagnosis": rows, "figure": figure,
        "not_tested": ["several hosts: network, storage and clocks between machines" if jax.process_count() == 1 else
                       "hosts, networks and storage other than those of this run",
                       "accelerators" if jax.default_backend() == "cpu" else "other accelerators",
                       "another job's checkpoint, data pipeline or optimizer"]}, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib"):
        import matplotlib
        from matplotlib.figure import Figure
        matplotlib.rcParams["svg.hashsalt"] = "distributed-04"
        drawing = Figure(figsize=(7, 4), layout="constrained")
        axes = drawing.add_subplot(xlabel=figure["xlabel"], ylabel=figure["ylabel"], xticks=figure["x"])
        for (name, losses), style in zip(series.items(), ("o-", "x--", "s:", "^:"), strict=True):
            axes.plot(figure["x"], losses, style, label=name, markersize=9 if name == "uninterrupted" else 6)
        axes.legend()
        drawing.savefig(evidence / "distributed-04.svg", metadata={"Date": None})

# ---- The protocol ----

def drill() -> list[str]:
    """Run the whole drill; returns the report. Raises Refused or Failed."""
    join_group()
    folder = epath.Path(SETTINGS.folder or tempfile.mkdtemp(prefix="distributed-04-"))
    together(lambda: look_up(folder))
    baseline = transition(initial_state()).state
    restored = load_accepted(folder) if SETTINGS.resume else save_accepted(folder, baseline)
    together(lambda: check_state("restored", baseline, restored))
    uninterrupted, resumed = replay(baseline), replay(restored)

    def check_replay() -> None:
        check_arithmetic("uninterrupted", baseline, uninterrupted)
        check_arithmetic("resumed", restored, resumed)
        for number, (wanted, got) in enumerate(zip(uninterrupted, resumed, strict=True), 1):
            check("ids", f"resumed update {number}", wanted.ids, got.ids)
            check("loss", f"resumed update {number}", wanted.loss, got.loss)
            check_state(f"after resumed update {number}", wanted.state, got.state)

    together(check_replay)
    rows, runs = diagnose(baseline, uninterrupted)
    drift = np.abs(host(runs["momentum lost"][0].state["weights"]) - host(uninterrupted[0].state["weights"])).max()
    if SETTINGS.evidence:
        together(lambda: jax.process_index() == 0 and write_evidence(
            folder, baseline, restored, {"uninterrupted": uninterrupted, "restored": resumed, **runs}, rows))
    alone = SETTINGS.multiprocess and jax.process_count() == 1
    return [
        f"Recorded backend/processes/devices: {jax.default_backend()} {jax.process_count()} {jax.device_count()}",
        f"Restored step/cursor: {host(restored['step'])} {host(restored['cursor'])}",
        f"Next sample IDs across epoch boundary: {[update.ids for update in resumed[:REPLAY_STEPS]]}",
        f"Uninterrupted losses: {[update.loss for update in uninterrupted[:REPLAY_STEPS]]}",
        f"Restored losses: {[update.loss for update in resumed[:REPLAY_STEPS]]}",
        f"Checkpoint: {folder / 'step-one'}",
        f"Same next sample IDs, different weights after missing momentum: {drift}",
        *rows,
        "Five resumed transitions and all addressable parameter replicas agree.",
        "Current-epoch batch matches; next-epoch batch exposes the wrong key.",
        "PASS: distributed-04" + " (one process: not multi-controller evidence)" * alone]

def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        report = drill()
        with phase("waiting for all processes to leave"):
            jax.distributed.shutdown()
        leave(0, report)
    except Refused as refusal:
        leave(2, [], str(refusal))
    except Failed as failure:
        leave(1, [f"FAIL: distributed-04: {failure}"], f"look in {SETTINGS.folder or 'the checkpoint folder'}")
    except BaseException:
        leave(1, [], traceback.format_exc())

if __name__ == "__main__":
    main()
