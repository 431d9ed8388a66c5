"""Commands of other gateways with one upstream behind them, which serves the model `m`."""

from __future__ import annotations

import shlex

COMMANDS = {
    # it wants a key of its own or this word, and one to send
    "litellm": "env LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY=true OPENAI_API_KEY=none "
    "LITELLM_LOCAL_MODEL_COST_MAP=True {bin}/litellm --host 127.0.0.1 --port {port} "
    "--model openai/m --alias m --api_base {upstream}/v1 --telemetry False --num_workers 1",
    "smg": "{bin}/smg launch --host 127.0.0.1 --port {port} --worker-urls {upstream} "
    "--policy round_robin",
    "vllm-router": "{bin}/vllm-router --host 127.0.0.1 --port {port} --worker-urls {upstream} "
    "--policy round_robin --prometheus-port 29002",
}


def command(name: str, how: str, port: int, upstream: str) -> list[str]:
    """The words that start a peer. how: the folder of an environment in which a known one is
    installed, or the command of any, with {port} and {upstream}."""
    text = how if "{port}" in how else COMMANDS[name]
    return shlex.split(text.format(port=port, upstream=upstream, bin=f"{shlex.quote(how)}/bin"))
