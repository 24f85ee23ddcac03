"""Fixtures of the tests of ``TrainPipelineCudaGraph``."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device, with a process group of one rank."""
    is_cpu = request.param == "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products
        backend = "gloo" if is_cpu else "nccl"
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
        yield torch.device("cpu") if is_cpu else torch.device("cuda", 0)
        dist.destroy_process_group()
