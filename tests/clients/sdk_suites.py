"""The tests that OpenAI's and Anthropic's Python clients bring along, against a server of ours.

    python -m tests.clients.sdk_suites FOLDER

FOLDER holds their unpacked source distributions, as `.ci/clients` fetches them. The tests call each
method with every parameter there is and check the types of what comes back strictly. Model names that
they use are aliases of the demo model. `sdk_misses.txt` says which fail, and why; another failure is
an error here, and so is a test that passes though it is listed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from tests.api.server import serving

OPTIONS = ("--offline", "--context", "512")  # many of the tests set no limit to the reply
MISSES = Path(__file__).with_name("sdk_misses.txt")


@dataclass(frozen=True)
class Suite:
    """files: those about routes that the server has. under: the path that the client puts first."""

    package: str
    files: tuple[str, ...]
    under: str = ""


SUITES = (
    Suite(
        "openai",
        ("chat/test_completions.py", "test_completions.py", "test_embeddings.py", "test_models.py",
         "test_responses.py", "test_batches.py", "test_files.py", "responses/test_input_items.py"),
        "/v1",
    ),
    Suite("anthropic", ("test_messages.py", "test_models.py")),
)  # fmt: skip


def aliases(paths: list[Path]) -> list[str]:
    """Options that give the demo model every name that tests call a model."""
    text = "\n".join(path.read_text() for path in paths)
    names = set(re.findall(r'\bmodel="([^"]+)"', text)) | set(
        re.findall(r'retrieve\(\n\s+"([^"]+)"', text)
    )
    return [part for name in sorted(names) for part in ("--alias", f"{name}=smollm2")]


def failed(
    suite: Suite, root: Path, paths: list[Path], url: str, out: Path
) -> tuple[set[str], int]:
    """The tests that fail, and how many there are."""
    report = out / f"{suite.package}.xml"
    env = os.environ | {"TEST_API_BASE_URL": url + suite.under, "PYTHONPATH": str(root)}
    subprocess.run(
        [sys.executable, "-m", "pytest", *paths, "-q", "-k", "not Async", "-p", "no:cacheprovider",
         "-W", "ignore", "--override-ini=addopts=", "--override-ini=filterwarnings=",
         f"--junitxml={report}"],
        cwd=root, env=env, check=False, stdout=subprocess.DEVNULL, timeout=600,
    )  # fmt: skip
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    if os.environ.get("SDK_SUITES_SHOW"):
        for case in bad:
            (found, *_) = [e for e in case if e.tag in ("failure", "error")]
            print(_name(suite, case), "|", (found.get("message") or "")[:300], flush=True)
    return {_name(suite, case) for case in bad}, len(cases)


def _name(suite: Suite, case: ElementTree.Element) -> str:
    place = str(case.get("classname")).removeprefix("tests.api_resources.")
    return f"{suite.package} {place}.{str(case.get('name')).partition('[')[0]}"


def known() -> dict[str, str]:
    lines = [line for line in MISSES.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, reason in (line.split("|", 1) for line in lines)}


def main() -> None:
    folder, misses, wrong = Path(sys.argv[1]), known(), False
    for suite in SUITES:
        (root,) = folder.glob(f"{suite.package}-*/")
        paths = [root / "tests/api_resources" / file for file in suite.files]
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch)
            with serving("smollm2", *OPTIONS, *aliases(paths), log=out / "log") as server:
                pid = server.engine().pid
                bad, count = failed(suite, root, paths, server.url, out)
                assert server.engine().pid == pid
        expected = {name for name in misses if name.startswith(suite.package + " ")}
        print(f"{suite.package}: {count} tests, {len(expected)} known misses")
        for name in sorted(bad ^ expected):
            print(f"{name}: {'fails' if name in bad else 'passes, but is listed'}", file=sys.stderr)
        wrong = wrong or bad != expected
    sys.exit(wrong)


if __name__ == "__main__":
    main()
