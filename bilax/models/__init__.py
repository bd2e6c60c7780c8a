"""Networks that turn the inputs of one task into features. They hold weights and nothing else."""

from bilax.models.dense import Dense
from bilax.models.faster_convolutions import faster_convolutions
from bilax.models.networks import Block, ConvNet4, ResNet12

__all__ = ["Block", "ConvNet4", "Dense", "ResNet12", "faster_convolutions"]
