"""``vllm-topkx bench``: one subcommand a benchmark, each in a module ``bench_NAME``."""

from __future__ import annotations

import argparse
import importlib

from . import add_command

BENCHMARKS = {"passes": "time the exchange pass on graphs of growing size"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example:\n  vllm-topkx bench passes --nodes 5000 --chains 60"
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, summary in BENCHMARKS.items():
        add_command(commands, name, summary, importlib.import_module(f".bench_{name}", __package__))
