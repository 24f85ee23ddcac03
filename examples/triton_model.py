"""A model for Triton Inference Server's Python backend, which serve_dlrm.py --triton writes.

A REQUEST is JSON in the format of serve_dlrm.py, and SCORES are the scores of its candidates.
Triton passes batches of requests to execute(). PyTorch, FBGEMM and torchrec_jagged_attn must be
installed on the server, in the versions that compiled the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import fbgemm_gpu  # noqa: F401, registers the lookups
import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # provided by Triton
from scoring import RequestError, Requests, Server


class TritonPythonModel:
    """The model that Triton calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model next to this file."""
        folder = Path(args["model_repository"], args["model_version"])
        device = torch.device("cpu")
        if args["model_instance_kind"] == "GPU":
            device = torch.device("cuda", int(args["model_instance_device_id"]))
        features = json.loads((folder / "features.json").read_text())
        scorer = torch._inductor.aoti_load_package(str(folder / "scorer.pt2"))
        self._server = Server(scorer, Requests(features, device))

    def execute(self, requests: list) -> list:
        """Return a response for each request; an invalid request does not affect the others."""
        inputs = [pb_utils.get_input_tensor_by_name(x, "REQUEST").as_numpy() for x in requests]
        scores = self._server.scores([x.item() if x.size == 1 else x.tolist() for x in inputs])
        return [_response(x) for x in scores]


def _response(scores: np.ndarray | RequestError) -> pb_utils.InferenceResponse:
    if isinstance(scores, RequestError):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(scores)))
    return pb_utils.InferenceResponse([pb_utils.Tensor("SCORES", scores[np.newaxis])])
