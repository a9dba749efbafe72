"""The decoder of the Llama family over packed tokens: no padding, no batch dimension.

Takes weights, the step's inputs, the KV tensors and the adapters; the arithmetic is the kernels'.
A row of the result depends on its own sequence only, up to the rounding of the matrix products.
Knows no requests.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear

from engine.inputs import ForwardInputs
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig, lora_sites
from engine.rope import cos_sin_table
from engine.weights import LayerWeights, Weights
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from lora.layers import apply_lora_, apply_lora_embedding_
from lora.mapping import LoraBatch
from lora.pool import AdapterPool
from lora.sites import Site


class Model:
    def __init__(self, config: ModelConfig, weights: Weights, max_len: int) -> None:
        self.config = config
        self.weights = weights
        table = cos_sin_table(config.rope, config.head_dim, max_len)
        self._cos_sin = table.to(weights.embedding.device)
        self._scale = config.head_dim**-0.5
        sites = lora_sites(config)
        self._layer_sites = tuple(
            (sites[i], sites[i + 1], sites[i + 2], sites[i + 3])  # qkv, o, gate_up, down
            for i in range(0, 4 * config.num_layers, 4)
        )
        self._head_site, self._embedding_site = sites[-2:]

    def forward(self, inputs: ForwardInputs, kv: KVCache, pool: AdapterPool) -> torch.Tensor:
        """-> [rows whose logits are wanted, H], normed. Writes K and V of all tokens."""
        config, lora = self.config, inputs.lora
        residual = embedding(inputs.token_ids, self.weights.embedding)  # [T, H]
        if lora is not None:
            apply_lora_embedding_(self._embedding_site, residual, inputs.token_ids, lora, pool)
        layers = self.weights.layers
        hidden = rms_norm(residual, layers[0].input_norm, config.rms_norm_eps)
        for i, layer in enumerate(layers):
            qkv_site, o_site, gate_up_site, down_site = self._layer_sites[i]
            qkv = self._linear(hidden, layer.qkv, layer.qkv_bias, qkv_site, lora, pool)
            attended = self._attend(i, layer, qkv, inputs, kv)
            hidden = self._linear(attended, layer.o, layer.o_bias, o_site, lora, pool)
            hidden, residual = add_rms_norm(hidden, residual, layer.post_norm, config.rms_norm_eps)
            gate_up = self._linear(
                hidden, layer.gate_up, layer.gate_up_bias, gate_up_site, lora, pool
            )
            hidden = self._linear(
                silu_mul(gate_up), layer.down, layer.down_bias, down_site, lora, pool
            )
            if i + 1 < len(layers):
                hidden, residual = add_rms_norm(
                    hidden, residual, layers[i + 1].input_norm, config.rms_norm_eps
                )
        rows = torch.tensor(inputs.logit_rows, dtype=torch.int64, device=hidden.device)
        hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
        return add_rms_norm(hidden, residual, self.weights.norm, config.rms_norm_eps)[0]

    def logits(
        self, hidden: torch.Tensor, rows: tuple[int, ...], lora: LoraBatch | None, pool: AdapterPool
    ) -> torch.Tensor:
        """[R, H] -> [R, V] float32. `rows`: the rows of the step that they are."""
        logits = linear(hidden, self.weights.head)
        if lora is not None and pool.site_pool(self._head_site.name) is not None:
            apply_lora_(self._head_site, (logits,), hidden, lora.select(rows), pool)
        return logits.float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        qkv: torch.Tensor,
        inputs: ForwardInputs,
        kv: KVCache,
    ) -> torch.Tensor:
        """-> [T, Hq * D]"""
        config = self.config
        q = rope_kv_write(
            qkv,
            inputs.positions,
            self._cos_sin,
            kv.k[index],
            kv.v[index],
            inputs.slots,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            layer.q_norm,
            layer.k_norm,
            config.rms_norm_eps,
        )
        window = config.sliding_windows[index]
        return paged_attention(
            q, kv.k[index], kv.v[index], inputs.attention, self._scale, window
        ).flatten(1)

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: Site,
        lora: LoraBatch | None,
        pool: AdapterPool,
    ) -> torch.Tensor:
        y = linear(x, weight, bias)
        if lora is not None:
            outputs = torch.split(y, [part.out_features for part in site.slices], dim=-1)
            apply_lora_(site, outputs, x, lora, pool)
        return y
