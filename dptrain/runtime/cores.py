"""CPU threads of this process: its share of the node's cores."""

import os

from threadpoolctl import threadpool_info, threadpool_limits

from dptrain.runtime.launcher import THREAD_VARIABLES, share_of_cores


def limit_threads(local_size: int) -> int:
    """Limit BLAS to this process's share of its node's cores, and return the number of threads.

    What the user set through the environment stands. A process alone on its node keeps what BLAS chose.

    Args:
        local_size: ranks on this node.
    """
    if local_size > 1 and not any(os.environ.get(variable) for variable in THREAD_VARIABLES):
        threadpool_limits(share_of_cores(local_size), user_api="blas")
    threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return max(threads, default=share_of_cores(local_size))


def use_one_blas_thread() -> None:
    """Let BLAS compute on one thread from now on: with more of them, products have other bits."""
    threadpool_limits(1, user_api="blas")
