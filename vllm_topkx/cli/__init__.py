"""The command line ``vllm-topkx``. A command is a module with ``add_arguments(parser)`` and ``run(args) -> int``.

A module is imported when its command runs. Exit codes: 0 fine, 1 the command's own "no" (a mismatch), 2
bad input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from .._version import __version__

COMMANDS = {
    "demo": "compile a small DSA model with vLLM's own stack and check its decode steps on W ranks",
    "verify": "merge logits dumped from a real run and compare with a stable sort",
    "fuzz": "merge random logits for as long as asked, and compare with a stable sort",
    "doctor": "show what this machine and this installation can run, and why not the rest",
    "compat": "show what of a vLLM release the plugin can hook into, from its source",
    "soak": "merge a great many times and check every row",
    "bench": "measure on this machine",
    "graph": "print the FX graph of a function before and after the exchange pass",
}


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_command(commands: argparse._SubParsersAction, name: str, summary: str, module: ModuleType | None) -> None:
    """A subcommand of ``commands``; with its ``module`` it has arguments and can run."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if module is not None:
        parser.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(parser)


def _build(argv: Sequence[str]) -> Parser:
    """The parser of all commands; the module of the one that ``argv`` names is imported."""
    parser = Parser(
        prog="vllm-topkx",
        description="The exact global top-K of sparse attention under decode context parallelism.",
        epilog="example: vllm-topkx doctor    (COMMAND --help has an example of each command)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vllm-topkx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        add_command(commands, name, summary, importlib.import_module(f".{name}", __name__) if name == chosen else None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command in ``argv`` (default: the process's arguments); returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    from ..ops.errors import ExchangeTimeoutError, TopkxError

    name = "vllm-topkx"
    try:
        args = _build(argv).parse_args(argv)
        name = f"vllm-topkx {args.command}"
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TopkxError, OSError, ExchangeTimeoutError) as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, ExchangeTimeoutError) else 2


def one_line(error: BaseException) -> str:
    """What ``error`` says, on one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
