"""The launch scripts: clean shell, the commands they would run, and a run of the smoke recipe. Slurm for real is in
test_system_slurm.py."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pcmepp_openclip.host import flags
from pcmepp_openclip.training.config import RunConfig, make_parser, parse

REPO = Path(__file__).parent.parent
LAUNCH = REPO / "launch"
RECIPES = sorted(path.stem for path in (LAUNCH / "recipes").iterdir())
RUNS = {  # how LAUNCH names a launcher: what its command starts with
    "": ["python3", str(LAUNCH / "torchrun.py")],
    "launch/local.sh": ["python3", str(LAUNCH / "torchrun.py")],
    "launch/nodes.sh": ["python3", str(LAUNCH / "torchrun.py")],
    "launch/vm.sh": ["python3", str(LAUNCH / "torchrun.py")],
    "bash launch/slurm.sbatch": ["srun", "--kill-on-bad-exit=0"],
    "sbatch --nodes 2 launch/slurm.sbatch": ["sbatch", "--nodes", "2", "launch/slurm.sbatch"],
}


def call(*command, **variables):
    """The words of the one line that a script prints, as the shell would take them."""
    drop = ("SLURM_", "LAUNCH", "PYTHON", "NPROC")
    env = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    done = subprocess.run([*map(str, command)], env={**env, **variables}, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1 and not done.stderr
    return shlex.split(done.stdout)


def parsed(words):
    """The arguments that `pcmepp train` takes from a command's flags."""
    return vars(flags.read(make_parser(), words, RunConfig()))


def test_every_script_is_clean_shell():
    tracked = subprocess.run(["git", "ls-files", "launch"], cwd=REPO, capture_output=True, text=True, check=True)
    scripts = [REPO / name for name in tracked.stdout.splitlines() if name.endswith((".sh", ".sbatch"))]
    scripts.append(REPO / "tests/support/cluster/cluster")
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck and len(scripts) > 8
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for script in scripts:
        if os.access(script, os.X_OK):
            assert "\nset -euo pipefail\n" in script.read_text(), script


@pytest.mark.parametrize(
    "recipe, launcher",
    [*((recipe, "") for recipe in RECIPES), *((RECIPES[0], launcher) for launcher in RUNS if launcher)],
)
def test_a_dry_run_prints_the_command_of_a_recipe(recipe, launcher):
    where = {"DATA": "/the data", "LOGS": "/runs", "NNODES": "2", "HEAD": "node1", "LAUNCH": launcher}
    script = LAUNCH / f"recipes/{recipe}.sh"
    words = call(script, "--epochs", "3", "--dry-run", "48", "--wandb-notes", "it's 2 $words", **where)
    start = RUNS[launcher]
    assert words[: len(start)] == start and not {"--dry-run", "48"} & {*words}
    if "sbatch --nodes" in launcher:
        flags = words[len(start) :]
    else:
        split = words.index("pcmepp_openclip.train")  # what is in front of `--` is torchrun's
        assert words[split - 2 : split] == ["-m", "--"] and words[words.index("--max-restarts") + 1] == "0"
        flags = words[split + 1 :]
    args = parsed(flags)
    assert args["epochs"] == 3 and args["wandb_notes"] == "it's 2 $words"
    assert (args["logs"], args["name"], args["resume"]) == ("/runs", recipe, "latest")
    named = call(script, "--dry-run", "--name", "other", **where, NAME="mine")
    assert parsed(named[named.index("--logs") :])["name"] == "other"


def test_a_recipe_is_checked_by_pcmepp_train_itself(tmp_path):
    env = {**os.environ, "LAUNCH": f"{sys.executable} -m pcmepp_openclip.train", "LOGS": str(tmp_path)}
    command = [LAUNCH / "recipes/smoke-cpu.sh", "--dry-run", "4"]
    done = subprocess.run(command, env={**env, "PYTHONPATH": str(REPO)}, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"global batch\W+32\b", done.stdout), done.stdout + done.stderr


def test_the_paper_s_recipe():
    words = call(LAUNCH / "recipes/cc3m-cc12m-redcaps-b16.sh", "--dry-run", DATA="/data")
    args = parsed(words[words.index("pcmepp_openclip.train") + 1 :])
    assert args["train_data"] == "cc3m=/data/cc3m/*.tar::cc12m=/data/cc12m/*.tar::redcaps=/data/redcaps/*.tar"
    wanted = {"model": "PCMEpp-ViT-B-16", "epochs": 32, "global_batch_size": 1024, "opt": "adamw", "wd": 0.2}
    wanted |= {"lr": 5e-4, "beta1": 0.9, "beta2": 0.98, "eps": 1e-6, "warmup": 5 * 2000, "lr_scheduler": "cosine"}
    wanted |= {"vib_weight": 1e-6, "pp_weight": 0, "init_match_scale": 1, "init_match_shift": 1}
    assert {key: args[key] for key in wanted} == wanted


@pytest.mark.parametrize("how", ["code", "paper"])
def test_the_paper_s_fine_tuning(how):
    """As the authors' code has it, and with the values of the paper that the recipe and the docs name."""
    recipe, docs = LAUNCH / "recipes/coco-b32.sh", (REPO / "docs/finetuning.md").read_text()
    named = dict(re.findall(r"^#   (--[\w-]+) (\w+) ", recipe.read_text(), re.MULTILINE))
    assert named == {"--swa-start-epoch": "15", "--warm-up-after-freeze": "lr"}
    assert all(re.search(rf"`{flag}[^|]*` \| `?{value}`? \|", docs.replace("\\|", "")) for flag, value in named.items())
    more = [word for pair in named.items() for word in pair] if how == "paper" else []
    words = call(recipe, "--dry-run", *more, DATA="/data")
    args = vars(parse(words[words.index("pcmepp_openclip.train") + 1 :]))
    wanted = {"epochs": 25, "global_batch_size": 128, "opt": "timm/adamp", "lr": 5e-4, "wd": 1e-4, "grad_clip_norm": 2}
    wanted |= {"opt_kwargs": {"wd_ratio": 0.1, "nesterov": False}, "layer_decay": 0.7, "image_lr_multiplier": 0.01}
    wanted |= {"text_lr_multiplier": 0.1, "freeze_image_epochs": 2, "freeze_text_epochs": None, "lr_drop_epochs": [15]}
    wanted |= {"swa_start_epoch": 16, "warm_up_after_freeze": "loss"}
    wanted |= {"swa_start_epoch": 15, "warm_up_after_freeze": "lr"} if how == "paper" else {}
    wanted |= {"contrastive_weight": 0, "match_weight": 2, "vib_weight": 1e-4, "pp_weight": 0.1}
    assert {key: args[key] for key in wanted} == wanted


def test_what_the_authors_code_does_beside_the_paper():
    """The lines of the recipe's comment are flags that can be appended to it."""
    recipe = (LAUNCH / "recipes/coco-b32.sh").read_text()
    named = " ".join(re.findall(r"^#     (--.+?)(?:   .*)?$", recipe, re.MULTILINE)).split()
    words = call(LAUNCH / "recipes/coco-b32.sh", "--dry-run", *named, DATA="/data")
    args = parsed(words[words.index("pcmepp_openclip.train") + 1 :])
    wanted = {"label_smoothing": 1e-4, "crop_sides": [0.6, 1.0], "flip": True, "image_resize_mode": "squash"}
    wanted |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    assert {key: args[key] for key in wanted} == wanted


def test_the_launchers_take_their_numbers_from_the_variables():
    words = call(LAUNCH / "nodes.sh", "--dry-run", NNODES="3", HEAD="10.0.0.1", PORT="1234", NPROC="4", RUN_ID="x")
    line = " ".join(words)
    assert "--nnodes 3 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:1234 --rdzv-id x --rdzv" in line
    assert "--rdzv-conf join_timeout=600,read_timeout=600 -m" in line
    line = " ".join(call(LAUNCH / "local.sh", "--dry-run", PYTHON="/opt/python"))
    assert line.startswith(f"/opt/python {LAUNCH}/torchrun.py ") and "--standalone --nproc-per-node gpu -m" in line


@pytest.mark.parametrize(
    "script, variables, word",
    [
        ("slurm.sbatch", {}, "sbatch"),
        ("nodes.sh", {"HEAD": "node1"}, "NNODES"),
        ("nodes.sh", {"NNODES": "2"}, "HEAD"),
        ("recipes/cc3m-b32.sh", {}, "DATA"),
    ],
)
def test_what_is_missing_is_named(script, variables, word):
    env = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(["bash", LAUNCH / script], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and word in done.stderr and len(done.stderr.splitlines()) == 1


CODE = "PATH[$(touch ran)]"  # to shell arithmetic, the element of an array: it runs the command for its index
NUMBERS = {
    "local.sh": ["NPROC", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
    "nodes.sh": ["NNODES", "NPROC", "PORT", "JOIN_SECONDS"],
    "vm.sh": ["NPROC", "MAX_RESTARTS", "VM_RESTARTS"],
    "slurm.sbatch": [
        *("NPROC", "MAX_RESTARTS", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT"),
        *("SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK"),
    ],
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_GPUS_ON_NODE": "1"}


@pytest.fixture
def hostile(tmp_path):
    """hostile(script, *flags, **variables): a launcher whose programs are stand-ins. A run of theirs crashes after it
    has saved, so that a launcher which starts it again counts the starts."""
    run = tmp_path / "logs/run"
    crash = f"mkdir -p {run}/checkpoints; sleep 0.05; touch {run}/checkpoints/epoch_1.pt; exit 1"
    record = "JobId=7 JobState=RUNNING PreemptTime=None StartTime=2030"
    stubs = {"python3": crash, "srun": crash, "nvidia-smi": "echo GPU 0"}
    answers = f'hostnames) echo node1 ;; job) echo " {record} " ;; *) touch {tmp_path}/requeued ;;'
    stubs["scontrol"] = f"case $2 in {answers} esac"
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def call(script, *flags, **variables):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CLOUD": "none", "NNODES": "2", "HEAD": "node1"}
        command = ["bash", LAUNCH / script, "--logs", tmp_path / "logs", "--name", "run", *flags]
        return subprocess.run(command, env=env | variables, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return call


@pytest.mark.parametrize("script, name", [(script, name) for script, names in NUMBERS.items() for name in names])
def test_a_number_is_digits_and_is_not_run(hostile, tmp_path, script, name):
    job = JOB if script == "slurm.sbatch" else {}
    others = ("1e3", "-1", "9" * 19, "ranks", "1\n") if name in ("NPROC", "NNODES") else ()  # one function checks all
    for value in (CODE, "08", *others):
        done = hostile(script, **{**job, "MAX_RESTARTS": "1", name: value})
        assert not (tmp_path / "ran").exists(), value
        assert done.returncode == 2 and done.stderr.startswith(f"{name}="), (value, done.stderr)
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["vm.sh", "slurm.sbatch"])
def test_restarts_are_counted_as_before(hostile, tmp_path, script):
    counted = {"vm.sh": {"VM_RESTARTS": "3"}, "slurm.sbatch": {**JOB, "SLURM_RESTART_COUNT": "3"}}[script]
    done = hostile(script, **counted, MAX_RESTARTS="3")
    assert done.returncode == 1 and "3 times (MAX_RESTARTS)" in done.stdout
    again = hostile(script, **counted, MAX_RESTARTS="4")
    assert (tmp_path / "requeued").exists() if script == "slurm.sbatch" else "already started again 4" in again.stdout


@pytest.mark.parametrize("script", [*NUMBERS, "recipes/cc3m-b32.sh", "recipes/head-only.sh"])
@pytest.mark.parametrize("name", ["HEAD", "RUN_ID", "LOGS", "NAME", "DATA", "CACHE", "PYTHON", "LAUNCH", "METADATA"])
def test_words_are_not_run(hostile, tmp_path, script, name):
    for value in (CODE, "a b* $(touch ran) `touch ran`; touch ran", "-K/etc"):
        launcher = {} if name == "LAUNCH" else {"LAUNCH": str(LAUNCH / "nodes.sh")}
        hostile(script, "--dry-run", **{"DATA": "data", **launcher, name: value})
        assert not (tmp_path / "ran").exists(), value


def test_a_metadata_server_is_an_address(hostile, tmp_path):
    """curl would take `-K FOLDER` for an option: a file of its settings."""
    done = hostile("vm.sh", CLOUD="gcp", METADATA=f"-K{tmp_path}")
    assert done.returncode == 2 and "METADATA=" in done.stderr and not (tmp_path / "logs").exists()


def test_cdpath_leads_to_no_other_folder(tmp_path):
    (tmp_path / "launch/data").mkdir(parents=True)
    words = call("bash", "launch/local.sh", "--dry-run", CDPATH=f"{tmp_path}")
    assert words[1] == f"{LAUNCH}/torchrun.py"
    command = ["bash", "launch/data/coco.sh", "--dry-run", "a.json", "images", "out"]
    env = {**os.environ, "CDPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=REPO, capture_output=True, text=True, check=True)
    assert f"{LAUNCH}/data/karpathy.py" in done.stdout.splitlines()[0]


def test_a_site_file_is_the_one_that_is_named(hostile, tmp_path):
    for folder, python in ((tmp_path, "here"), (tmp_path / "other", "elsewhere")):
        folder.mkdir(exist_ok=True)
        (folder / "my-site.sh").write_text(f"PYTHON={python}\n")
    path = f"{tmp_path}/other:{os.environ['PATH']}"
    assert hostile("local.sh", "--dry-run", PATH=path, SITE="my-site.sh").stdout.startswith("here ")
    done = hostile("local.sh", "--dry-run", SITE="no-site.sh")
    assert done.returncode == 2 and "SITE=no-site.sh" in done.stderr


@pytest.mark.parametrize("name", ["a[1]", "-n", "a b"])
def test_a_run_of_any_name_resumes_from_its_own_checkpoint(hostile, tmp_path, name):
    (tmp_path / "logs" / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "logs" / name / "checkpoints/epoch_1.pt").touch()
    (tmp_path / "python3").write_text(f'#!/usr/bin/env bash\necho "$@" >{tmp_path}/words\n')
    hostile("vm.sh", f"--name={name}", "--resume", "other.pt")
    assert (tmp_path / "words").read_text().endswith("--resume other.pt --resume latest\n")
    assert (tmp_path / "logs" / name / "started").exists()


def test_slurm_s_times_are_read_in_its_own_format(hostile, tmp_path):
    """A job whose last preemption is older than its start is not being preempted, whatever format times have."""
    (tmp_path / "scontrol").write_text(f"""#!/usr/bin/env bash
        early=2030-01-02T10:00:00 late=2030-01-10T09:00:00
        if [[ ${{SLURM_TIME_FORMAT:-standard}} == relative ]]; then early=10:00:00 late=09:00:00; fi
        case $2 in
        hostnames) echo node1 ;;
        job) echo " JobId=7 JobState=RUNNING PreemptTime=$early StartTime=$late " ;;
        *) touch {tmp_path}/requeued ;;
        esac
    """)
    (tmp_path / "sleep").write_text("#!/usr/bin/env bash\nexec /bin/sleep 0.1\n")  # in place of an hour
    (tmp_path / "sleep").chmod(0o755)
    done = hostile("slurm.sbatch", **JOB, SLURM_TIME_FORMAT="relative")
    assert (tmp_path / "requeued").exists() and "preempted" not in done.stdout


def test_the_exit_code_of_a_launcher_is_that_of_a_rank(tmp_path):
    """The report of torchrun is printed for a crash only; otherwise the rank has said why it ended."""
    bodies = {"import sys; sys.exit(75)": 75, "import sys; sys.exit(2)": 2, "pass": 0, "1 / 0": 1}
    bodies["import os; os.kill(os.getpid(), 9)"] = 137
    loop = f"""
import sys, torchrun
for number, body in enumerate({list(bodies)}):
    path = {str(tmp_path)!r} + f"/{{number}}.py"
    open(path, "w").write(body)
    print("rank", number, file=sys.stderr)
    print(torchrun.run(["--standalone", "--nproc-per-node", "1", path]))
"""
    env = {**os.environ, "PYTHONPATH": str(LAUNCH)}
    done = subprocess.run([sys.executable, "-c", loop], env=env, capture_output=True, text=True)
    assert [int(code) for code in done.stdout.split()] == list(bodies.values()), done.stderr
    reported = ["Root Cause" in part for part in re.split(r"^rank \d$", done.stderr, flags=re.MULTILINE)[1:]]
    assert reported == [code not in (0, 2, 75) for code in bodies.values()]


def test_the_site_file_is_heard(tmp_path):
    site = tmp_path / "site.sh"
    site.write_text("PYTHON=(apptainer exec --nv 'my image.sif' python)\n")
    words = call(LAUNCH / "local.sh", "--dry-run", SITE=str(site))
    assert words[:6] == ["apptainer", "exec", "--nv", "my image.sif", "python", f"{LAUNCH}/torchrun.py"]


def test_a_launch_folder_with_a_space_under_slurm(tmp_path):
    """Slurm runs a copy of the script, which finds the folder that it came from in Slurm's record of the job."""
    shutil.copytree(LAUNCH, tmp_path / "my launch")
    spool, tools, logs = tmp_path / "spool", tmp_path / "tools", tmp_path / "logs"
    spool.mkdir()
    tools.mkdir()
    shutil.copy(LAUNCH / "slurm.sbatch", spool / "slurm_script")
    record = f"JobId=7 JobState=RUNNING Command={tmp_path}/my launch/slurm.sbatch --model x Command=y WorkDir=/a b"
    stubs = {
        "scontrol": f'[[ $2 == hostnames ]] && echo node1 || echo "{record}"',
        "srun": f'printf "%s\\n" "$@" >{tmp_path}/words; touch {logs}/run/done',
    }
    for name, body in stubs.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "NPROC": "1"}
    command = ["bash", spool / "slurm_script", "--model", "x", "--logs", logs, "--name", "run"]
    done = subprocess.run(command, env={**env, "SLURM_JOB_NUM_NODES": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pcmepp_openclip.train" in (tmp_path / "words").read_text().split()


def test_the_smoke_recipe_stops_on_a_signal_to_its_launcher_and_goes_on(tmp_path):
    command = [LAUNCH / "recipes/smoke-cpu.sh", "--train-num-samples", "480", "--name", "run"]
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(REPO), "LOGS": str(tmp_path)}
    log = tmp_path / "run/out.log"

    def steps():
        return re.findall(r"Train Epoch: 0 \[ *(\d+)/480", log.read_text()) if log.exists() else []

    with open(tmp_path / "output", "w") as output:
        first = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        while len(steps()) < 3 and first.poll() is None:
            time.sleep(0.05)
        first.send_signal(signal.SIGUSR2)
        assert first.wait(60) != 0
    assert (tmp_path / "run/stopped").exists(), (tmp_path / "output").read_text()[-3000:]
    assert 3 <= len(steps()) < 30
    again = subprocess.run(command, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    assert steps() == [str(16 * i) for i in range(1, 31)]
    assert (tmp_path / "run/done").read_text() == "480 samples\n" and not (tmp_path / "run/stopped").exists()
