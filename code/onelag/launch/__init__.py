"""From a configuration to a running job: the exact command line, sbatch scripts for torchrun or srun, submitit, or plain torchrun on one node.

scripts.py is pure text, tasks.py what submitit runs, command.py `onelag launch`. Examples and advice for NCCL lie in code/launch.
"""
