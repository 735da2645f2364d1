"""Limits this process to its share of the node's cores."""

import os

from threadpoolctl import threadpool_info, threadpool_limits

from dptrain.runtime.launch.launcher import THREAD_VARIABLES, share_of_cores


def limit_threads(local_size: int) -> int:
    """Limit BLAS to this process's share of the cores, unless the user set it; return the number of threads."""
    if local_size > 1 and not any(os.environ.get(variable) for variable in THREAD_VARIABLES):
        threadpool_limits(share_of_cores(local_size), user_api="blas")
    threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return max(threads, default=share_of_cores(local_size))


def use_one_blas_thread() -> None:
    """Limit BLAS to one thread: more of them change the bits of products."""
    threadpool_limits(1, user_api="blas")
