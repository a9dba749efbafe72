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
from engine.weights import Weights
from kernels.embedding import gather_embedding, resolve_tokens
from kernels.lora_plan import LoraPlan
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul
from lora.layers import (
    apply_lora_,
    apply_lora_embedding_,
    expand_,
    expand_rope_kv_write,
    expand_silu_mul,
    shrink,
)
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
        hidden, residual = None, self.embed(inputs, pool)
        for i in range(self.config.num_layers):
            q, residual = self.before_attention(i, hidden, residual, inputs, kv, pool)
            attended = self.attend(i, q, inputs, kv)
            hidden, residual = self.after_attention(i, attended, residual, inputs, pool)
        assert hidden is not None
        return self.finish(hidden, residual, inputs)

    def before_attention(
        self,
        index: int,
        hidden: torch.Tensor | None,  # [T, H] what the layer before adds; None: there is none
        residual: torch.Tensor,  # [T, H]
        inputs: ForwardInputs,
        kv: KVCache,
        pool: AdapterPool,
        out: torch.Tensor | None = None,  # for q
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> rotated q [T, Hq, D], residual. K and V are in the cache."""
        norm, eps = self.weights.layers[index].input_norm, self.config.rms_norm_eps
        if hidden is None:
            hidden = rms_norm(residual, norm, eps)
        else:
            hidden, residual = add_rms_norm(hidden, residual, norm, eps)
        return self._project(index, hidden, inputs, kv, pool, out), residual

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        inputs: ForwardInputs,
        kv: KVCache,
        out: torch.Tensor | None = None,  # as q
    ) -> torch.Tensor:
        """-> [T, Hq * D]"""
        k, v, window = kv.k[index], kv.v[index], self.config.sliding_windows[index]
        return paged_attention(q, k, v, inputs.attention, self._scale, window, out).flatten(1)

    def after_attention(
        self,
        index: int,
        attended: torch.Tensor,  # [T, Hq * D]
        residual: torch.Tensor,
        inputs: ForwardInputs,
        pool: AdapterPool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> what the layer adds to the residual, residual."""
        layer, lora = self.weights.layers[index], inputs.lora
        o_site, down_site = self._layer_sites[index][1], self._layer_sites[index][3]
        hidden = self._linear(attended, layer.o, layer.o_bias, o_site, lora, pool)
        hidden, residual = add_rms_norm(hidden, residual, layer.post_norm, self.config.rms_norm_eps)
        hidden = self._gate(index, hidden, lora, pool)
        return self._linear(hidden, layer.down, layer.down_bias, down_site, lora, pool), residual

    def finish(
        self, hidden: torch.Tensor, residual: torch.Tensor, inputs: ForwardInputs
    ) -> torch.Tensor:
        """-> [rows whose logits are wanted, H], normed."""
        if inputs.logit_rows is not None:
            hidden = hidden.index_select(0, inputs.logit_rows)
            residual = residual.index_select(0, inputs.logit_rows)
        return add_rms_norm(hidden, residual, self.weights.norm, self.config.rms_norm_eps)[0]

    def logits(
        self, hidden: torch.Tensor, inputs: ForwardInputs, first: int, pool: AdapterPool
    ) -> torch.Tensor:
        """[R, H] -> [R, V] float32. They are the rows of the step's result from `first` on."""
        head = self.weights.head
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Rounded to bf16, logits above 16 are 1/8 apart and greedy choices tie.
            logits = torch.mm(hidden, head.T, out_dtype=torch.float32)
        else:
            logits = linear(hidden, head).float()
        lora = inputs.optional_lora
        if lora is not None and pool.site_pool(self._head_site.name) is not None:
            rows = inputs.host_logit_rows[first : first + hidden.shape[0]]
            apply_lora_(self._head_site, (logits,), hidden, lora.select(rows), pool)
        return logits

    def embed(self, inputs: ForwardInputs, pool: AdapterPool) -> torch.Tensor:
        token_ids, table, in_flight = inputs.token_ids, self.weights.embedding, inputs.in_flight
        if in_flight is None:
            embedded = embedding(token_ids, table)
        else:
            embedded = gather_embedding(token_ids, in_flight.sources, in_flight.drawn, table)
        lora = inputs.optional_lora
        if lora is not None:
            if in_flight is not None:
                token_ids = resolve_tokens(token_ids, in_flight.sources, in_flight.drawn)
            apply_lora_embedding_(self._embedding_site, embedded, token_ids, lora, pool)
        return embedded

    def _project(
        self,
        index: int,
        hidden: torch.Tensor,
        inputs: ForwardInputs,
        kv: KVCache,
        pool: AdapterPool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """-> rotated q [T, Hq, D]; K and V are in the cache."""
        config, layer, site = self.config, self.weights.layers[index], self._layer_sites[index][0]
        rope = (
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
            out,
        )
        if isinstance(inputs.lora, LoraPlan):
            qkv = linear(hidden, layer.qkv, layer.qkv_bias)
            bridge = shrink(site, hidden, inputs.lora, pool)
            return expand_rope_kv_write(site, qkv, bridge, inputs.lora, pool, *rope)
        qkv = self._linear(hidden, layer.qkv, layer.qkv_bias, site, inputs.lora, pool)
        return rope_kv_write(qkv, *rope)

    def _gate(
        self, index: int, hidden: torch.Tensor, lora: LoraBatch | LoraPlan | None, pool: AdapterPool
    ) -> torch.Tensor:
        """[T, H] -> [T, I]"""
        layer, site = self.weights.layers[index], self._layer_sites[index][2]
        if isinstance(lora, LoraPlan):
            gate_up = linear(hidden, layer.gate_up, layer.gate_up_bias)
            return expand_silu_mul(site, gate_up, shrink(site, hidden, lora, pool), lora, pool)
        return silu_mul(self._linear(hidden, layer.gate_up, layer.gate_up_bias, site, lora, pool))

    def _linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        site: Site,
        lora: LoraBatch | LoraPlan | None,
        pool: AdapterPool,
    ) -> torch.Tensor:
        y = linear(x, weight, bias)
        if isinstance(lora, LoraPlan):
            expand_(site, y, shrink(site, x, lora, pool), lora, pool)
        elif lora is not None:
            outputs = torch.split(y, [part.out_features for part in site.slices], dim=-1)
            apply_lora_(site, outputs, x, lora, pool)
        return y
