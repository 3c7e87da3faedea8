"""The cluster examples for KubeRay and Slurm, as far as they can be checked without either."""

from __future__ import annotations

import shlex
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from tests.docs.test_command_lines import unknown_options

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/cluster"


def test_kuberay_follows_the_guide() -> None:
    job, service = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ray = next(need for need in map(Requirement, project["optional-dependencies"]["cluster"]) if need.name == "ray")
    assert ray.specifier.contains(cluster["rayVersion"])
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert environment["RAY_AUTH_MODE"] == "token"
        assert container["envFrom"] == [{"secretRef": {"name": "tinsmith"}}]
        assert container["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    words = shlex.split(job["spec"]["entrypoint"])
    assert list(unknown_options(" ".join(words[1:]))) == []
    wanted = int(words[words.index("--trainers") + 1]) + int(words[words.index("--samplers") + 1])
    (workers,) = cluster["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert wanted <= workers["replicas"] * int(limits["nvidia.com/gpu"])
    assert service["spec"]["ports"][0]["targetPort"] == 8000


def test_slurm_script_is_sound() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    settings = dict(line[8:].partition("=")[::2] for line in text.splitlines() if line.startswith("#SBATCH"))
    command = text.partition("-- ")[2].splitlines()[0].split()
    assert command[:2] == ["tinsmith", "serve"]
    wanted = int(command[command.index("--trainers") + 1]) + int(command[command.index("--samplers") + 1])
    assert wanted == int(settings["--nodes"]) * int(settings["--gpus-per-node"])
