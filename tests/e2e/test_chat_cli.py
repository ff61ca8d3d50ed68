"""chat.py as a user runs it: on a terminal and through a pipe, with commands, pastes, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from infer.chat import run
from infer.config import ChatConfig, ModelConfig, ProposerConfig
from infer.console.chat_session import describe_drafts
from infer.options.cli import compose
from infer.options.exported_heads import with_head

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
GREEN = "\x1b[32m"
CLEAN = str.maketrans({code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"})
HINT = "Ctrl-D ends"  # the last row of the card
PATIENCE_S = 240.0  # for output, before a test gives up
MORE = "tokens/s"  # part of the line after a response


@pytest.fixture(scope="session")
def endless_folder(make_target_folder: Callable[..., Path]) -> Path:
    """Return a target with a chat template and a context of 2^16 that never emits its end token."""
    folder = make_target_folder(seed=5, max_position_embeddings=2**16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][0] = 0.0  # of hundreds of random logits some are above 0, so it is never the highest
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def overrides(folder: Path, *extra: str) -> list[str]:
    """Return the overrides; a small cache leaves room for a short conversation and makes start-up profiling short."""
    return [
        "model=demo",
        "model.name=tiny",
        f"model.path={folder}",
        "model.device=cpu",
        "engine.threads=1",
        "engine.max_tokens_in_cache=2048",
        "proposer=suffix",
        "proposer.adaptive=false",
        "max_tokens=24",
        *extra,
    ]


@pytest.fixture
def chat(
    endless_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[list[str], str]]:
    """Return `chat("line", ..., options=[...])`: the responses to the lines of a pipe, and what goes to stderr."""

    def talk(*lines: str, options: list[str] | None = None) -> tuple[list[str], str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        handler = signal.getsignal(signal.SIGINT)
        run(with_head(compose("chat", ChatConfig, overrides(endless_folder, *(options or [])))))
        assert signal.getsignal(signal.SIGINT) is handler
        out, err = capsys.readouterr()
        return out.removesuffix("\n").split("\n") if out else [], err

    return talk


@pytest.fixture(scope="module")
def responses(endless_folder: Path) -> Callable[..., list[str]]:
    """Return `responses(["message", ...], system=..., **sampling)`: plain decoding's, each after the earlier turns."""
    from infer.engine import Engine
    from infer.request import SamplingParams

    engine = Engine.load(ModelConfig(name="tiny", path=str(endless_folder)), proposer=ProposerConfig(name="none"))
    assert engine.tokenizer is not None

    def talk(messages: list[str], *, system: str | None = None, max_tokens: int = 24, **sampling: Any) -> list[str]:
        history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        texts = []
        for message in messages:
            history.append({"role": "user", "content": message})
            ids = engine.tokenizer.apply_chat_template(history)  # pyright: ignore[reportOptionalMemberAccess]
            (completion,) = engine.generate([ids], SamplingParams(max_tokens=max_tokens, **sampling))
            history.append({"role": "assistant", "content": completion.text})
            texts.append(completion.text or "")
        return texts

    return talk


def shown(texts: list[str]) -> list[str]:
    return "\n".join(texts).split("\n")


def test_a_pipe_is_one_message_a_line_and_later_ones_see_the_history(chat, responses):
    out, err = chat("def f(", "what did I say", "multi\\", "ple lines")
    assert out == shown(responses(["def f(", "what did I say", "multi\nple lines"]))
    assert out != shown(responses(["def f("]) + responses(["what did I say"]) + responses(["multi\nple lines"]))
    for row in (r"model +tiny \(.*\), float32 on cpu", "speculation +suffix", "end tokens +0", "memory +weights"):
        assert re.search(row, err)
    assert err.count("tokens/s, 24 tokens, the first after") == 3
    assert "> what did I say" in err


def test_switching_speculation_changes_no_token_of_an_answer(chat, responses):
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    options = ["temperature=0.8", "top_p=0.9", "seed=7", "system='Be brief, please.'"]
    message = "x = 1; x = 1; x = 1; x = 1;"
    out, err = chat(message, "/off", "/regenerate", "and now", "/on", "/regenerate", "/regenerate", options=options)
    first, second = responses([message, "and now"], system="Be brief, please.", **sampling)
    assert out == shown([first, first, second, second, second])
    assert err.count("\nthe same tokens as before\n") == 3
    assert "not the same" not in err
    lines = [line for line in err.splitlines() if MORE in line]
    assert [line.startswith("τ 1.00, no drafts") for line in lines] == [False, True, True, False, False]
    assert "drafted by suffix" in lines[0]


def test_commands_change_the_conversation_and_unknown_ones_are_not_sent(chat, responses):
    out, err = chat("one", "/nonsense", "/new", "one", "/system Talk.", "two", "/system", "/quit", "never read")
    assert out == shown([*responses(["one"]), *responses(["one"]), *with_system_later(responses)])
    assert "/nonsense: no such command, nothing was sent" in err
    assert "no system message" in err
    out, err = chat("/help", "/regenerate", "  ", "/etc/passwd is a file")
    assert "/regenerate  answer the last message again" in err
    assert "error: /regenerate: nothing was said yet" in err
    assert out == shown(responses(["/etc/passwd is a file"]))


def with_system_later(responses: Callable[..., list[str]]) -> list[str]:
    """Return the second response, where the first was generated without the system message that now precedes both."""
    from infer.console.chat_history import Dialogue, Turn

    dialogue = Dialogue("Talk.", [Turn("one", responses(["one"])[0], [], [])])
    system, user, assistant, last = dialogue.messages("two")
    assert [message["role"] for message in (system, user, assistant, last)] == ["system", "user", "assistant", "user"]
    return [response_to(responses, [system, user, assistant, last])]


def response_to(responses: Callable[..., list[str]], messages: list[dict[str, Any]]) -> str:
    """Return the response to a message history, by the engine in the closure of `responses`."""
    engine = next(cell.cell_contents for cell in responses.__closure__ or () if hasattr(cell.cell_contents, "step"))
    from infer.request import SamplingParams

    ids = engine.tokenizer.apply_chat_template(messages)
    return engine.generate([ids], SamplingParams(max_tokens=24))[0].text


def test_a_conversation_that_outgrows_the_context_loses_its_oldest_turns(chat, responses):
    messages = [f"message number {number} of a long talk" for number in range(8)]
    out, err = chat(*messages, "word " * 400, "still here", options=["engine.max_tokens_in_cache=256"])
    dropped = re.findall(r"the context of 256 tokens is full: the oldest (\d+) turns were dropped", err)
    assert dropped
    assert all(int(count) >= 1 for count in dropped)
    assert re.search(r"error: the message is too long: \d+ tokens where the context leaves room for 232", err)
    assert err.count(MORE) == 9
    assert out[: len(shown(responses(messages[:3])))] == shown(responses(messages[:3]))


def test_a_model_without_a_template_is_refused(chat, tmp_path, endless_folder):
    for file in endless_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match=r"model=tiny: has no chat template.*python infer/generate.py model=tiny"):
        chat("hi", options=[f"model.path={tmp_path}"])


@pytest.mark.parametrize(
    ("option", "message"),
    [("temprature=1", "temprature: unknown key; did you mean temperature?"), ("max_tokens=0", "max_tokens=0: must be")],
)
def test_mistakes_name_the_key(chat, option, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        chat("hi", options=[option])


class Terminal:
    """A child process on a terminal, with the actions of a person who uses it."""

    def __init__(self, child: subprocess.Popen[bytes], end: int) -> None:
        self.child, self._end = child, end
        self.output, self._bytes, self._read = "", b"", 0

    def wait_for(self, text: str) -> str:
        """Return the output up to and including the next `text`, without line-editing escape codes but with colors."""
        while (index := self.output.find(text, self._read)) < 0:
            self._receive()
        begin, self._read = self._read, index + len(text)
        return self.output[begin : self._read]

    def wait_for_characters(self, count: int) -> None:
        """Wait for `count` further characters; a later `wait_for` still sees them."""
        while len(self.output) < self._read + count:
            self._receive()

    def _receive(self) -> None:
        assert select.select([self._end], [], [], PATIENCE_S)[0], f"nothing more comes: {self.output[-2000:]!r}"
        self._bytes += os.read(self._end, 65536)
        self.output = re.sub(r"\x1b\[\?2004[hl]|\r", "", self._bytes.decode(errors="replace"))

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C at a prompt, once the program waits for a key.

        Python does not handle a signal that arrives between the display of a prompt or a letter and the wait for a key
        until the next line.
        """
        while Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.01)
        self.type("\x03")

    def ask(self, message: str) -> str:
        """Type a message and return its response: the text and the line after it."""
        self.type(message + "\r")
        response = self.wait_for(MORE)
        return response + self.wait_for("\n")

    def rest(self) -> str:
        pieces = []
        while True:
            try:
                piece = os.read(self._end, 65536)
            except OSError:  # Linux raises it when the other end is closed
                break
            if not piece:
                break
            pieces.append(piece.decode(errors="replace"))
        return "".join(pieces)


@contextmanager
def terminal(folder: Path, *extra: str, **environment: str) -> Iterator[Terminal]:
    parent_fd, child_fd = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "INPUTRC")}
    with subprocess.Popen(
        [sys.executable, "infer/chat.py", *overrides(folder, *extra)],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", "TERM": "xterm", "INPUTRC": "/dev/null", **environment},
        stdin=child_fd,
        stdout=child_fd,
        stderr=child_fd,
        start_new_session=True,
        preexec_fn=take_terminal,
    ) as child:
        os.close(child_fd)
        try:
            yield Terminal(child, parent_fd)
        finally:
            child.kill()
    os.close(parent_fd)


def take_terminal() -> None:
    """Make stdin the child's controlling terminal, so that Ctrl-C sends SIGINT, which background tests ignore."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_conversation_on_a_terminal(endless_folder, responses):
    repeats, pasted = "x = 1; x = 1; x = 1; x = 1;", "first line\nsecond\tline\nthird line"
    expected = responses([repeats, pasted, "more"])
    with terminal(endless_folder) as session:
        session.wait_for(HINT)
        session.wait_for("> ")
        colored = session.ask(repeats)
        assert GREEN in colored
        assert expected[0].translate(CLEAN).replace("\r", "") in ESCAPES.sub("", colored)
        session.type("/off\r")
        session.wait_for("speculation is off")
        session.type("/regenerate\r")
        plain = session.wait_for("the same tokens as before")
        assert GREEN not in plain
        session.type(f"\x1b[200~{pasted}\x1b[201~")
        assert expected[1].translate(CLEAN) in ESCAPES.sub("", session.ask(""))
        session.wait_for("> ")
        session.type("not sent")
        session.wait_for("not sent")
        session.interrupt()  # discards the typed text
        assert "Ctrl-C again" not in session.wait_for("> ")
        session.type("more\r")
        assert expected[2].translate(CLEAN) in ESCAPES.sub("", session.wait_for(MORE))
        session.wait_for("> ")  # before the prompt the terminal itself reads Ctrl-D
        session.type("\x04")
        assert session.child.wait(PATIENCE_S) == 0
        assert "Traceback" not in session.output + session.rest()


def test_ctrl_c_just_behind_an_answer_does_not_end_the_program(chat, responses, monkeypatch):
    def interrupted(*arguments: Any) -> str:
        signal.raise_signal(signal.SIGINT)
        return describe_drafts(*arguments)

    monkeypatch.setattr("infer.console.chat_session.describe_drafts", interrupted)
    out, err = chat("one", "two")
    assert out == shown(responses(["one", "two"]))
    assert err.count(MORE) == 2


def test_ctrl_c_stops_an_answer_and_not_the_program(endless_folder, responses):
    (expected,) = (text.translate(CLEAN).replace("\r", "") for text in responses(["one\ntwo\nthree"]))
    options = ["max_tokens=60000", "engine.max_tokens_in_cache=65536", "proposer=none", "color=never"]
    with terminal(endless_folder, *options, TERM="dumb") as session:
        session.wait_for(HINT)
        session.type("say much\r")
        session.wait_for_characters(400)  # the response has begun, and would take minutes
        session.type("\x03")
        tokens = re.search(r"(\d+) tokens, the first", session.wait_for("; stopped"))
        assert tokens is not None
        assert 0 < int(tokens[1]) < 60000
        session.type("/new\r")
        session.wait_for("a new conversation")
        session.wait_for("> ")
        session.type("one\ntwo\nthree\n")  # this terminal has no bracketed paste
        session.wait_for_characters(400)
        session.type("\x03")
        assert expected in session.wait_for("; stopped")
        session.wait_for("> ")
        session.interrupt()
        assert session.child.wait(PATIENCE_S) == 0
        assert "Traceback" not in session.output + session.rest()


def test_the_command_reads_a_pipe(endless_folder, responses):
    ran = subprocess.run(
        [sys.executable, "infer/chat.py", *overrides(endless_folder)],
        cwd=ROOT,
        input="hi\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == responses(["hi"])[0] + "\n"
