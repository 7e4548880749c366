"""`python -m bridge`: the commands of this package."""

import sys
from pathlib import Path

import click


@click.group()
def main() -> None:
    """jax_mla in SGLang."""


@main.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here.")
def demo(json_file: Path | None) -> None:
    """Serve a tiny DeepSeek-V3.2 with SGLang and measure it against transformers; fails if it is out of bounds."""
    from bridge.demo.app import main as run

    sys.exit(run(json_file))


@main.command()
@click.option("--json", is_flag=True, help="Print the findings as JSON.")
def doctor(json: bool) -> None:
    """Say whether this machine can serve, check by check, and what to do where it can't."""
    from bridge.doctor import main as run

    sys.exit(run(json))


if __name__ == "__main__":
    main(prog_name="python -m bridge")
