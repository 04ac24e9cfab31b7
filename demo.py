"""A crash and a resumption, to watch: `checkpoint demo`.

Three real processes: an agent, the relay and a server with a side effect. The server keeps a ledger of what it really
did, on disk before it answers; the ledger is the judge, not our journal. Everything lives in a temporary folder.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

_DEADLINE_S: Final = 10.0

# Charges a card: one line in the ledger, on disk, for each charge. It takes its time over the fourth one.
_SERVER: Final = """\
import json, os, sys, time

def charge(who, amount):
    with open("ledger.txt", "a") as ledger:
        ledger.write(f"charged {who} {amount} EUR\\n")
        ledger.flush()
        os.fsync(ledger.fileno())
    if who == "Dora":
        time.sleep(60)
    return {"content": [{"type": "text", "text": f"receipt for {who}, {amount} EUR"}]}

with open("server.pid", "w") as file:
    file.write(str(os.getpid()))

for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
                  "serverInfo": {"name": "bank", "version": "1"}}
    elif request.get("method") == "tools/call":
        result = charge(**request["params"]["arguments"])
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""

# Charges five customers in order. It remembers nothing: after a crash it starts over, with the same pins.
_AGENT: Final = """\
import json, subprocess, sys

relay = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def ask(number, method, params):
    request = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    print(json.dumps(request), file=relay.stdin, flush=True)
    return json.loads(relay.stdout.readline())

ask(0, "initialize", {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "agent"}})
for step, who in enumerate(["Ada", "Ben", "Cleo", "Dora", "Emil"], start=1):
    print(f"  agent: step {step}, charge {who:5}", end="", flush=True)
    answer = ask(step, "tools/call", {"name": "charge", "arguments": {"who": who, "amount": 10 * step},
                                      "_meta": {"checkpoint_seq": step}})
    if "error" in answer:
        print("-> refused:", answer["error"]["data"]["checkpoint"]["reason"])
        print("  agent: I stop here. I was told:", answer["error"]["message"])
        break
    print("->", answer["result"]["content"][0]["text"], flush=True)
relay.stdin.close()
relay.wait()
"""


class DemoError(Exception):
    """The demonstration could not go on."""


def run(command: Sequence[str], say: Callable[[str], None]) -> int:
    """Plays the demonstration; `command` starts Checkpoint, `say` shows a line. Gives the exit code."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-demo-") as folder:
        _play(folder, command, say)
    return 0


def _play(folder: str, command: Sequence[str], say: Callable[[str], None]) -> None:
    for name, text in (("server.py", _SERVER), ("agent.py", _AGENT)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    server = shlex.join([sys.executable, "server.py"])
    relay = [*command, "--upstream-cmd", server, "--journal", "j.db", "--log-level", "error"]

    say("An agent charges five cards through a server that it does not want to call twice:")
    say("  agent -> checkpoint --upstream-cmd 'python server.py' --journal j.db -> server")
    say("")
    say("1. The first run. Everything is killed with SIGKILL in the middle of step 4.")
    with _agent(folder, relay) as agent:
        _wait_for_charge(folder, "Dora", agent)
        _kill_all(folder, agent)
        _show(agent, say)
    say("  ...killed: the agent, checkpoint and the server")
    _show_ledger(folder, say)
    say("")
    say("2. The same agent again, from step 1, with the same journal.")
    with _agent(folder, relay) as agent:
        _show(agent, say)
    _show_ledger(folder, say)
    say("")
    charges = _ledger(folder)
    repeated = len(charges) - len(set(charges))
    say("Steps 1 to 3 were answered from the journal, without the server. Nobody but the bank can know")
    say(f"whether step 4 went through, so it was not run again. Charges that happened twice: {repeated}.")


@contextlib.contextmanager
def _agent(folder: str, relay: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """A running agent, of which nothing is left afterwards, also when somebody interrupts the demonstration."""
    agent = subprocess.Popen(
        [sys.executable, "agent.py", *relay],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that it can be killed with all that it started
    )
    try:
        yield agent
    finally:
        if agent.poll() is None:
            _kill_all(folder, agent)
            agent.communicate()


def _wait_for_charge(folder: str, who: str, agent: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not any(who in charge for charge in _ledger(folder)):
        if time.monotonic() > deadline or agent.poll() is not None:
            raise DemoError("the server was never asked for that step; the lines above say why")
        time.sleep(0.01)


def _kill_all(folder: str, agent: "subprocess.Popen[str]") -> None:
    """SIGKILL to agent and relay, which are one process group, and to the server, which the relay keeps apart."""
    os.killpg(agent.pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        with open(os.path.join(folder, "server.pid"), encoding="utf-8") as file:
            os.kill(int(file.read()), signal.SIGKILL)


def _ledger(folder: str) -> list[str]:
    try:
        with open(os.path.join(folder, "ledger.txt"), encoding="utf-8") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _show(agent: "subprocess.Popen[str]", say: Callable[[str], None]) -> None:
    try:
        output, _ = agent.communicate(timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"the agent did not end within {_DEADLINE_S:.0f} seconds; is the machine very busy?") from error
    for line in output.splitlines():
        say(line.rstrip())


def _show_ledger(folder: str, say: Callable[[str], None]) -> None:
    say("  the server's own ledger:")
    for charge in _ledger(folder):
        say(f"    {charge}")
