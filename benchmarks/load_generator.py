"""A public load generator, guidellm, against the server: run to completion, without errors.

    python -m benchmarks.load_generator --guidellm /path/to/its/venv/bin/guidellm [--requests 24]

guidellm is installed apart (`pip install guidellm` in an environment of its own). It gets the
bundled model's folder as its tokenizer and needs no network. Its report is kept, but for what each
request said and where files were. This shows that its dialect of OpenAI's protocol is understood;
how fast the server is, other benchmarks show.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_prefix import config
from benchmarks.common import machine, save, serving
from engine.models.bundled import bundled_folder
from engine.models.load import default_cache_dir


def run(guidellm: Path, folder: Path, requests: int, streams: int) -> dict[str, Any]:
    """guidellm's own report of one run against a server with all tiers on."""
    tokenizer = bundled_folder(default_cache_dir(), lambda activity, done: None)
    report = folder / "report.json"
    with serving(config(folder), folder) as url:
        command = [
            str(guidellm), "run",
            "--backend", f"kind=openai_http,target={url},model=bundled",
            "--profile", f"kind=concurrent,streams={streams}",
            "--constraint", f"kind=max_requests,count={requests}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=256,output_tokens=24",
            "--output", f"kind=json,path={report}",
            "--disable-console-interactive",
        ]  # fmt: skip
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment = {**alone, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, env=environment, cwd=folder, check=True)
    loaded: dict[str, Any] = json.loads(report.read_text())
    return loaded


def condensed(report: dict[str, Any]) -> dict[str, Any]:
    """The report without the requests' texts, of which it has the numbers, and without paths."""
    benchmarks = [
        {
            **{key: value for key, value in one.items() if key != "config"},
            "requests": {kind: len(some) for kind, some in one["requests"].items() if some},
        }
        for one in report["benchmarks"]
    ]
    return {"guidellm": report["metadata"]["guidellm_version"], "benchmarks": benchmarks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory() as name:
        report = run(options.guidellm, Path(name), options.requests, options.streams)
    result = condensed(report)
    for one in result["benchmarks"]:
        print(one["requests"])
        assert one["requests"] == {"successful": options.requests}, "some requests failed"
    assert tempfile.gettempdir() not in json.dumps(result), "the report names a folder of here"
    print(save("guidellm", measured_on, result))


if __name__ == "__main__":
    main()
