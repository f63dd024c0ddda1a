"""Command lines that parse back to the run they came from, scripts that do what they say under a stand-in scheduler, refusals."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tyro

from onelag import cli
from onelag.configs import CONFIGS, MODES, get_config
from onelag.launch.arguments import train_arguments
from onelag.launch.command import LaunchCommand
from onelag.launch.scripts import Cluster, Run, nodes_of, sbatch_script, torchrun_command

EXAMPLES = Path(__file__).parents[2] / "code" / "launch"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", MODES)
def test_the_command_line_is_the_run(name, mode):
    """Parsed by the real command line: every value arrives."""
    config = get_config(name).in_mode(mode)
    parsed = cli._parse(train_arguments(config, Path("runs/x")))
    assert parsed.config() == config.train and parsed.pipeline == config.pipeline and parsed.run_dir == Path("runs/x")


def test_every_kind_of_value_survives():
    config = get_config("smollm2-135m")
    optimizer = dataclasses.replace(config.train.optimizer, fallback_learning_rate=1e-4, weight_decay=0.0)
    train = dataclasses.replace(config.train, optimizer=optimizer, seed=7, clip_norm=0.0)
    pipeline = dataclasses.replace(config.pipeline, recompute=True, depth="eager", trace=Path("a b/trace.json"), timeout=90.5)
    parsed = cli._parse(train_arguments(dataclasses.replace(config, train=train, pipeline=pipeline), Path("runs/with space")))
    assert parsed.config() == train and parsed.pipeline == pipeline and parsed.run_dir == Path("runs/with space")
    odd = dataclasses.replace(train, optimizer=dataclasses.replace(optimizer, settings={"momentum": 0.9}))
    with pytest.raises(ValueError, match=r"optimizer.settings=.* cannot be given on a command line"):
        train_arguments(dataclasses.replace(config, train=odd), Path("runs"))


def test_a_model_without_a_name_is_refused():
    config = get_config("smollm2-135m")
    odd = dataclasses.replace(config, train=dataclasses.replace(config.train, model=dataclasses.replace(config.train.model, width=1152)))
    with pytest.raises(ValueError, match="is no preset"):
        train_arguments(odd, Path("runs"))


def options(script):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.M))


def command_in(script):
    """The words of command=(…), as the shell reads them."""
    text = script + '\nprintf "%s\\n" "${command[@]}"'
    text = text[min(place for place in (text.find("case \""), text.find("run_dir=")) if place >= 0) :]
    text = text[: text.index("\nasked=")] + '\nprintf "%s\\n" "${command[@]}"'
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={"SLURM_ARRAY_TASK_ID": "3"}).stdout.splitlines()


@pytest.mark.parametrize("launcher, tasks", [("torchrun", 1), ("srun", 8)])
def test_the_script_asks_for_what_the_run_needs(launcher, tasks, tmp_path):
    run = Run(get_config("moe-10b"), tmp_path / "it's a run")
    script = sbatch_script([run], Cluster(partition="gpu", account="me", hours=1.5, extra=("--exclusive",), setup=("module load cuda",)), launcher)
    asked = options(script)
    assert asked["nodes"] == "8" and asked["gpus-per-node"] == "8" and asked["ntasks-per-node"] == str(tasks) and asked["cpus-per-task"] == str(64 // tasks)
    assert asked["time"] == "01:30:00" and asked["signal"] == "B:USR1@300" and "requeue" in asked and "exclusive" in asked
    assert asked["partition"] == "gpu" and asked["account"] == "me" and "array" not in asked and "\nmodule load cuda\n" in script
    assert command_in(script) == run.command
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


def test_an_array_has_every_combination(tmp_path):
    command = LaunchCommand("smollm2-360m", modes=MODES, seeds=(0, 1), learning_rates=(1e-3, 2e-3), runs=tmp_path)
    runs = command.planned()
    assert len(runs) == len({run.directory for run in runs}) == 12
    script = sbatch_script(runs, Cluster(), "torchrun")
    assert options(script)["array"] == "0-11" and "%a" in options(script)["output"]
    assert command_in(script) == runs[3].command and runs[3].config.train.seed == 1 and runs[3].config.train.optimizer.learning_rate == 2e-3
    with pytest.raises(ValueError, match="equally many GPUs"):
        sbatch_script([Run(get_config("moe-2b"), tmp_path), Run(get_config("moe-10b"), tmp_path)], Cluster(), "srun")


@pytest.fixture
def scheduler(tmp_path):
    """Stand-ins for srun and scontrol that write down how they were called."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/bash\n[ "$1" = show ] && echo node0 || echo "scontrol $*" >> {log}\n')
    (tools / "srun").write_text(f'#!/bin/bash\necho "srun $MASTER_ADDR $MASTER_PORT $NCCL_DEBUG" >> {log}\nexec bash {tmp_path}/job.sh "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)

    def start(job, launcher="torchrun", **environment):
        (tmp_path / "job.sh").write_text(job)
        script = sbatch_script([Run(get_config("smollm2-135m"), tmp_path / "run")], Cluster(setup=()), launcher)
        (tmp_path / "run").mkdir(exist_ok=True)
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1", **environment}
        return subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True), log

    return start


def wait_for(path):
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never appeared"
        time.sleep(0.02)


def test_told_to_stop_it_drains_and_goes_back_into_the_queue(scheduler, tmp_path):
    """The trap passes SIGTERM on, waits for the run to end by itself, and only then requeues."""
    job = f"trap 'sleep 0.3; echo drained >> {tmp_path}/log; exit 0' TERM; touch {tmp_path}/started; while :; do sleep 0.05; done"
    process, log = scheduler(job)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "drains" in out
    assert log.read_text().splitlines() == ["srun node0 21234 WARN", "drained", "scontrol requeue 41234"]


@pytest.mark.parametrize(
    "job, environment, code, queued",
    [
        ("touch {run}/outcome.json", {}, 0, False),
        ("exit 3", {}, 3, False),  # in its first minutes: a wrong setting, not a lost node
        ("exit 3", {"SECONDS": "700"}, 3, True),
        ("exit 3", {"SECONDS": "700", "SLURM_RESTART_COUNT": "3"}, 3, False),
        ("exit 0", {"SECONDS": "700"}, 0, False),
    ],
)
def test_how_a_job_ends(scheduler, tmp_path, job, environment, code, queued):
    process, log = scheduler(job.format(run=tmp_path / "run"), **environment)
    process.communicate(timeout=20)
    assert process.returncode == code and ("scontrol requeue 41234" in log.read_text()) == queued


def test_a_finished_run_is_not_queued_again_however_it_ended(scheduler, tmp_path):
    job = f"trap 'touch {tmp_path}/run/outcome.json; exit 0' TERM; touch {tmp_path}/started; while :; do sleep 0.05; done"
    process, log = scheduler(job)
    wait_for(tmp_path / "started")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 0 and "requeue" not in log.read_text()


def test_what_the_launchers_start(scheduler, tmp_path):
    """torchrun once per node with the rendezvous; srun once per GPU with the ranks of Slurm's own numbering."""
    words = f'printf "%s\\n" "$@" > {tmp_path}/words'
    process, _ = scheduler(words)
    process.communicate(timeout=20)
    said = (tmp_path / "words").read_text().splitlines()
    run = Run(get_config("smollm2-135m"), tmp_path / "run")
    assert said[0] == "torchrun" and said[-len(run.command) :] == run.command
    assert said[1:11] == "--nnodes 1 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 41234 --rdzv-endpoint node0:21234".split()
    (tmp_path / "tools" / "python").write_text(f'#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $*" > {tmp_path}/words\n')
    (tmp_path / "tools" / "python").chmod(0o755)
    process, _ = scheduler('exec "$@"', "srun", SLURM_PROCID="5", SLURM_LOCALID="5", SLURM_NTASKS="8")
    process.communicate(timeout=20)
    assert (tmp_path / "words").read_text().strip() == "5 5 8 " + " ".join(run.command)


def test_one_node_without_a_scheduler(tmp_path, capsys):
    command = LaunchCommand("smollm2-135m", launcher="local", dry_run=True, runs=tmp_path)
    command.run()
    (run,) = command.planned()
    assert shlex.split(capsys.readouterr().out) == torchrun_command(run) == ["torchrun", "--standalone", "--nproc-per-node", "8", *run.command]
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"
    with pytest.raises(ValueError, match="moe-10b takes 8 nodes"):
        LaunchCommand("moe-10b", launcher="local", dry_run=True).run()


def test_without_sbatch_the_script_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"no sbatch here: the script is .*moe-2b\.sbatch"):
        LaunchCommand("moe-2b", runs=tmp_path / "runs", output=tmp_path / "scripts").run()
    assert (tmp_path / "scripts" / "moe-2b.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=moe-2b\n")


def test_sbatch_is_called_with_the_script(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text('#!/bin/bash\necho "Submitted batch job 77 ($(wc -l < "$1") lines)"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    LaunchCommand("moe-2b", runs=tmp_path / "runs", output=tmp_path / "scripts").run()
    assert "Submitted batch job 77" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, message",
    [
        (LaunchCommand("nothing"), "unknown configuration 'nothing'"),
        (LaunchCommand("moe-2b", modes=("async",)), "unknown mode 'async'"),
        (LaunchCommand("moe-10b", gpus=12), "gpus=12 is no multiple of stages=8"),
        (LaunchCommand("moe-10b", gpus=32, gpus_per_node=5), "do not fill nodes of gpus_per_node=5"),
        (LaunchCommand("dense-10b", gpus=8), "takes .* GB on a H100 SXM 80GB with 81.7 GB usable: pipeline.recompute=True"),
        (LaunchCommand("moe-2b", seeds=()), "there is no run to launch"),
    ],
)
def test_refusals_are_one_clear_line(command, message):
    with pytest.raises(ValueError, match=message) as error:
        command.run()
    assert "\n" not in str(error.value)


def test_nodes():
    config = get_config("smollm2-135m")
    assert nodes_of(config) == (1, 8) and nodes_of(get_config("dense-10b")) == (16, 8)
    assert nodes_of(dataclasses.replace(config, gpus_per_node=4)) == (2, 4)
    assert nodes_of(dataclasses.replace(config, stages=1)) == (1, 2)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.sbatch")), ids=lambda path: path.name)
def test_the_examples_are_what_is_generated(path):
    """code/launch/*.sbatch; their second line says by which command."""
    lines = path.read_text().splitlines(keepends=True)
    (command,) = re.findall(r"onelag (launch .*) --dry-run", lines[1])
    parsed = tyro.cli(LaunchCommand, args=shlex.split(command)[1:])
    assert "".join([lines[0], *lines[2:]]) == sbatch_script(parsed.planned(), parsed.cluster, parsed.launcher)
