# Settings that differ between sites. Sourced where a job is submitted and again on the nodes; everything is optional.
# shellcheck shell=bash disable=SC2034

# How Python is started: modules and an environment, or a container.
# module load cuda
# source /path/to/venv/bin/activate
# PYTHON=(apptainer exec --nv --bind /data /path/to/pcmepp.sif python)

# Defaults of sbatch, where the command line does not set them.
# export SBATCH_ACCOUNT=my-project
# export SBATCH_PARTITION=gpu
# export SBATCH_TIMELIMIT=24:00:00

# The network between the nodes, if NCCL or gloo choose the wrong one.
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# Nodes without internet access: nothing is looked up on the Hub.
# export HF_HUB_OFFLINE=1
