"""Runs one transcript for runbook.sh: python transcript.py FILE BASH SECONDS [record]

A transcript is a terminal session:

    # Header lines say what the case shows. Two have a meaning:
    # needs: gcloud root               commands on PATH; `root` and `linux` are the user and the system
    # decimals: rtol 2e-5 atol 2e-6    numbers settle within this tolerance
    $ command
    > its next line
    standard output
    [exit 0]

All commands run in one bash, in the folder $WORK. Into $WORK.log go the standard output and the status of each
(1, 1.exit, 2, ...), stderr, and `got`: the transcript as this run would have it. runbook.sh compares the two with
diff. $WORK stands for the folder's path in the output. Where numbers settle, the line of the transcript stands.
What else there is to say is printed; without `got` the case has failed, or needs what is missing here.
With `record`, FILE becomes `got` if its commands and statuses stay as they are.
"""

import os
import re
import shutil
import subprocess
import sys

STEP = re.compile(r"(\$ .*\n(?:>(?: .*)?\n)*)((?:(?!\$ |\[exit \d+\]$).*\n)*)(\[exit \d+\]\n)(\n*)", re.MULTILINE)
# A number has a point or an exponent, and no letter, digit, "_" or "." beside it: versions, digests and integers
# stay text, which is compared exactly.
NUMBER = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+))(?![\w.])", re.ASCII)


def read(path: str, default: str = "") -> str:
    """The text of a file, one character a byte, so that no output is unreadable; `default` if there is none."""
    if not os.path.exists(path):
        return default
    with open(path, encoding="latin-1", newline="\n") as file:
        return file.read()


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="latin-1", newline="\n") as file:
        file.write(text)


def parse(text: str, trouble: str = "") -> tuple[str, list[tuple[str, str, str, str]]]:
    """The header, and for each command its text, its output, its status and the empty lines after it.

    Exits, saying `trouble` first, if `text` is no transcript.
    """
    header = re.match(r"(?:(?:#.*)?\n)*", text)[0]
    at, steps = len(header), []
    while at < len(text) or not steps:
        step = STEP.match(text, at)
        if not step:
            line = text.count("\n", 0, at) + 1
            sys.exit(f"{trouble}line {line}: wanted '$ command', its output and '[exit N]'")
        steps.append(step.groups())
        at = step.end()
    return header, steps


def settings(header: str) -> tuple[list[str], tuple[float, float] | None]:
    """The needs that are missing on this machine, and the tolerance (rtol, atol) of decimals."""
    missing, tolerance = [], None
    known = {"root": os.getuid() == 0, "linux": sys.platform == "linux"}
    for line in re.findall(r"^# *(?:decimals|needs).*", header, re.MULTILINE):
        match line.split():
            case ["#", "decimals:", "rtol", rtol, "atol", atol]:
                tolerance = float(rtol), float(atol)
            case ["#", "needs:", *needs] if needs:
                missing += [need for need in needs if not known.get(need, shutil.which(need))]
            case _:
                sys.exit(f"malformed header: {line}")
    return missing, tolerance


def settle(want: list[str], got: list[str], rtol: float, atol: float) -> list[str]:
    """`got`, with each line that differs from a later wanted one only within the tolerance replaced by that."""
    settled, at = [], 0
    for line in got:
        text = NUMBER.split(line)
        for i in range(at, len(want)) if len(text) > 1 else ():
            wanted = NUMBER.split(want[i])
            pairs = zip(map(float, wanted[1::2]), map(float, text[1::2]), strict=False)
            if wanted[::2] == text[::2] and all(abs(g - w) <= atol + rtol * abs(w) < float("inf") for w, g in pairs):
                line, at = want[i], i + 1
                break
        settled.append(line)
    return settled


def main() -> None:
    path, bash, limit, action = sys.argv[1:]
    work = os.environ["WORK"]
    header, steps = parse(read(path))
    missing, tolerance = settings(header)
    if missing:
        sys.exit(f"needs {' '.join(missing)}")

    script = ""
    for n, (command, _, _, _) in enumerate(steps, 1):
        command = re.sub(r"^(\$ |> ?)", "", command, flags=re.MULTILINE)
        script += f'exec >"${{0%/*}}/{n}"\n{command}echo "[exit $?]" >"${{0%/*}}/{n}.exit"\n'
    write(f"{work}.log/session", script)
    with open(f"{work}.log/stderr", "w") as stderr:
        try:
            session = [bash, f"{work}.log/session"]
            subprocess.run(session, check=False, stdin=subprocess.DEVNULL, stderr=stderr, timeout=int(limit))
        except subprocess.TimeoutExpired:
            print(f"still running after {limit} s")

    got, streams = header, read(f"{work}.log/stderr")
    for n, (command, output, _, gap) in enumerate(steps, 1):
        printed = read(f"{work}.log/{n}")
        streams += printed
        lines = printed.replace(os.fsencode(work).decode("latin-1"), "$WORK").split("\n")
        if lines[-1]:
            lines += ["[no newline at the end]", ""]
        if tolerance:
            lines = settle(output.split("\n"), lines, *tolerance)
        got += command + "\n".join(lines) + read(f"{work}.log/{n}.exit", "[no exit status]\n") + gap
    if "Traceback" in streams and not any("Traceback" in output for _, output, _, _ in steps):
        got += "[Traceback in an output]\n"
    write(f"{work}.log/got", got)

    if action == "record":
        # A status that differs or is missing, a traceback, an output that reads as a command: all show here.
        if [step[::2] for step in parse(got, "not recorded: ")[1]] != [step[::2] for step in steps]:
            sys.exit("not recorded: an exit status differs, or an output begins like a command")
        write(f"{path}.new", got)
        os.replace(f"{path}.new", path)


main()
