"""octavo simulate."""

from __future__ import annotations

import click

from octavo.cli.numbers import Number, count
from octavo.cli.screen import say


@click.command()
@click.option(
    "--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option(
    "--port", type=count(0, 65535), default=8000, show_default=True,
    help="Port to listen on; 0 for any that is free.",
)  # fmt: skip
@click.option(
    "--name",
    metavar="NAME",
    default="simulated",
    show_default=True,
    help="What clients call the model.",
)
@click.option(
    "--prefill", type=Number(1), default=2000, show_default=True,
    help="Prompt tokens a second.",
)  # fmt: skip
@click.option(
    "--step", type=Number(0), default=20, show_default=True, metavar="MS",
    help="Milliseconds of a step, which gives every text a token.",
)  # fmt: skip
@click.option(
    "--slots", type=count(), default=16, show_default=True,
    help="Requests computed at once.",
)  # fmt: skip
@click.option(
    "--cache", type=count(0), default=65_536, show_default=True,
    help="Tokens that the prefix cache holds.",
)  # fmt: skip
@click.option(
    "--seed", type=count(0), default=0, show_default=True, help="Other seeds say other texts."
)
def simulate(
    host: str, port: int, name: str, prefill: float, step: float, slots: int, cache: int, seed: int
) -> None:
    """Serve an engine that computes nothing and takes as long as one would.

    For planning, and for trying what stands before engines: octavo gateway, clients, dashboards.
    """
    import uvicorn

    from octavo.server.ports import bind
    from octavo.simulate.engine import Speed
    from octavo.simulate.server import Simulated, SimulatedServer

    speed = Speed(prefill, step / 1000, slots, cache=cache)
    sock = bind(host, port)
    url = f"http://{host}:{sock.getsockname()[1]}"
    say(f"simulated engine at {url}/v1: {prefill:g} prompt tokens a second, {step:g} ms a step")
    config = uvicorn.Config(
        SimulatedServer(Simulated(name, seed, speed)), log_level="critical", lifespan="off",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    uvicorn.Server(config).run([sock])
