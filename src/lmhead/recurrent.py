"""The LSTM of `lmhead compare --recipe` as a model of transformers: `lmhead_lstm` in config.json.

After `register()`, `AutoConfig` and `AutoModelForCausalLM` open the model folder of a recipe's arm
like any other. It only reads and scores: the training loop has its own (`lmhead.lab.recipes.lstm`),
whose tensors have the same names.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

MODEL_TYPE = "lmhead_lstm"


class LSTMConfig(PretrainedConfig):  # type: ignore[misc]
    """What a recipe's arm says of its model.

    Args:
        recipe, arm: where it comes from.
        vocab_size, hidden_size, num_hidden_layers: sizes; layers are as wide as the tables.
        biases: of a layer: 1, or PyTorch's 2; None, as in folders of early versions: as the recipe
            has it.
        projection: whether a square map with a bias stands before the head; None: as the arm has.
        head_bias: whether the head has a bias; None: as the arm has.
    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        recipe: str = "",
        arm: str = "",
        vocab_size: int = 1,
        hidden_size: int = 1,
        num_hidden_layers: int = 1,
        biases: int | None = None,
        projection: bool | None = None,
        head_bias: bool | None = None,
        **other: Any,
    ) -> None:
        self.recipe, self.arm = recipe, arm
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        both = recipe == "word-language-model"
        self.biases = (2 if both else 1) if biases is None else biases
        self.projection = arm.endswith("+pr") if projection is None else projection
        self.head_bias = arm not in ("+re", "real") if head_bias is None else head_bias
        super().__init__(**other)


class LSTMForCausalLM(PreTrainedModel):  # type: ignore[misc]
    """Embedding, LSTM layers, an optional projection, head."""

    config_class = LSTMConfig
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(config.num_hidden_layers))
        self.projection = nn.Linear(width, width) if config.projection else None
        self.head = nn.Linear(width, config.vocab_size, bias=config.head_bias)
        if config.biases == 1:  # the other one is zero, and is not stored
            self._keys_to_ignore_on_load_missing = [r"layers\.\d+\.bias_hh_l0"]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.head = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """What a folder does not hold: the layers' second bias, zero."""
        for name, value in module.named_parameters(recurse=False):
            if name.startswith("bias"):
                nn.init.zeros_(value)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """Scores of the next token after each one read, `logits` [streams, tokens, vocab_size].

        Args:
            input_ids: [streams, tokens]; the layers' state is zero before the first and carried
                from one to the next.
        """
        x = self.embedding(input_ids).transpose(0, 1)
        for layer in self.layers:
            x, _state = layer(x)
        if self.projection is not None:
            x = self.projection(x)
        return CausalLMOutput(logits=self.head(x.transpose(0, 1)))


def register() -> None:
    """Tell transformers of the model; more than once does no harm."""
    AutoConfig.register(MODEL_TYPE, LSTMConfig, exist_ok=True)
    AutoModelForCausalLM.register(LSTMConfig, LSTMForCausalLM, exist_ok=True)
