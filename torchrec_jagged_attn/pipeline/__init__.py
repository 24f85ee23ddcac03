"""``TrainPipelineCudaGraph``: a training step of a TorchRec model in one CUDA graph."""

from torchrec_jagged_attn.pipeline.train_pipeline import TrainPipelineCudaGraph

__all__ = ["TrainPipelineCudaGraph"]
