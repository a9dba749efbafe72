"""The decoder over packed tokens, for every family: no padding, no batch dimension.

The differences of a family from Llama are in its description (`engine.families`), in the norms that
its weights have, and in numbers that are one or None elsewhere. Reads weights, the step's inputs,
the KV tensors and the adapters; the kernels hold the arithmetic. A row of the result depends on its
own sequence only, up to the rounding of the matrix products. Free of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch.nn.functional import embedding, pad

from engine.inputs import ForwardInputs, LoraReach
from engine.kv_cache import KVCache
from engine.model_config import ModelConfig, lora_sites
from engine.rope import RopeConfig, cos_sin_table
from engine.weights import LayerWeights, Weights
from kernels.collective import SOLO, Collective
from kernels.embedding import gather_embedding
from kernels.lora_embed import lora_embed_
from kernels.lora_head import lora_head_
from kernels.lora_plan import LoraPlan
from kernels.matrix import dense_linear
from kernels.paged_attention import paged_attention
from kernels.rms_norm import rms_norm, rms_norm_of_ranks_
from kernels.rope_write import QueryScaling, RopeWrite
from lora.layers import (
    Product,
    adapted_linear,
    apply_lora_,
    apply_lora_embedding_,
    product_add_rms_norm,
    product_all_reduce_add_rms_norm,
    product_norm_add_norm,
    product_rope_kv_write,
    product_silu_mul,
)
from lora.pool import AdapterPool

_ATTENTION, _MLP = 0, 1  # kinds of exchanges, which take turns


class Model:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_len: int,
        ranks: Collective = SOLO,
    ) -> None:
        """`config` and `weights`: of this rank's shard. All of the `ranks` make the same
        calls with the same inputs."""
        self.config = config
        self.weights = weights
        self.ranks = ranks  # the exchanges with the others
        tables: dict[RopeConfig | None, torch.Tensor | None] = {
            rope: _cos_sin(rope, config, weights, max_len) for rope in set(config.ropes)
        }
        self._cos_sin = tuple(tables[rope] for rope in config.ropes)
        self._q_scaling = tuple(map(_query_scaling, config.ropes))
        multiplier = config.embedding_multiplier
        if config.family.scales_embedding:
            # Rounded as Hugging Face does: in bfloat16, the root of 3072 is 55.5.
            multiplier = float(torch.tensor(multiplier, dtype=weights.embedding.dtype))
        self._embedding_multiplier = multiplier
        sites = lora_sites(config)
        self._layer_sites = tuple(
            (sites[i], sites[i + 1], sites[i + 2], sites[i + 3])  # qkv, o, gate_up, down
            for i in range(0, 4 * config.num_layers, 4)
        )
        self._head_site, self._embedding_site = sites[-2:]

    @property
    def table_bytes(self) -> int:
        """The bytes of the rotary tables: 134 MB for 131,072 positions of heads of 256."""
        tables = {id(table): table.nbytes for table in self._cos_sin if table is not None}
        return sum(tables.values())

    def layers_of_each_kind(self, kv: KVCache) -> tuple[int, ...]:
        """Returns layers that together launch every kernel and product of a step: the first two,
        and the first with weights, a window or rotary angles of each other kind."""
        kinds: dict[object, int] = {}
        for i, layer in enumerate(self.weights.layers):
            weights = tuple(_kind_of(getattr(layer, field.name)) for field in fields(layer))
            window, rope = self.config.sliding_windows[i], self.config.ropes[i]
            kinds.setdefault((weights, window, rope, kv.table_of[i]), i)
        return tuple(sorted({0, min(1, self.config.num_layers - 1), *kinds.values()}))

    def forward(
        self,
        inputs: ForwardInputs,
        kv: KVCache,
        pool: AdapterPool,
        layers: Sequence[int] | None = None,
        before: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Returns [rows whose logits are requested, H], normed. Writes K and V of all tokens.
        `layers`: these alone are computed; None: all. `before`: called with each layer before its
        attention."""
        added, residual = None, self.embed(inputs, pool)
        for i in range(self.config.num_layers) if layers is None else layers:
            q, residual = self.before_attention(i, added, residual, inputs, kv, pool)
            if before is not None:
                before(i)
            attended = self.attend(i, q, inputs, kv)
            added, residual = self.after_attention(i, attended, residual, inputs, pool)
        assert added is not None
        return self.finish(added, residual, inputs)

    def before_attention(
        self,
        index: int,
        added: Product | None,  # [T, H] by the layer before; None: there is none
        residual: torch.Tensor,  # [T, H]
        inputs: ForwardInputs,
        kv: KVCache,
        pool: AdapterPool,
        out: torch.Tensor | None = None,  # for q
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotated q [T, Hq, D] and the residual. K and V are then in the cache."""
        norm = self.weights.layers[index].input_norm
        if added is None:
            eps = self.config.rms_norm_eps
            hidden = residual if norm is None else rms_norm(residual, norm, eps)
        else:
            after = self.weights.layers[index - 1].mlp_post_norm
            hidden, residual = self._add(added, residual, after, norm, _MLP)
        return self._project(index, hidden, inputs, kv, pool, out), residual

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        inputs: ForwardInputs,
        kv: KVCache,
        out: torch.Tensor | None = None,  # as q
    ) -> torch.Tensor:
        """Returns [T, Hq * D]."""
        config, k, v = self.config, kv.k[index], kv.v[index]
        kv.arrivals.wait(index)
        window, cap = config.sliding_windows[index], config.attention_soft_cap
        plan = inputs.attention[kv.table_of[index]]
        return paged_attention(
            q, k, v, plan, config.attention_scale, window, out, soft_cap=cap
        ).flatten(1)

    def after_attention(
        self,
        index: int,
        attended: torch.Tensor,  # [T, Hq * D]
        residual: torch.Tensor,
        inputs: ForwardInputs,
        pool: AdapterPool,
    ) -> tuple[Product, torch.Tensor]:
        """Returns the layer's addition to the residual, and the residual."""
        layer = self.weights.layers[index]
        lora = inputs.lora_at(LoraReach.ALL, LoraReach.ATTENTION)
        _, o_site, gate_up_site, down_site = self._layer_sites[index]
        o = adapted_linear(o_site, attended, layer.o, layer.o_bias, lora, pool)
        hidden, residual = self._add(
            o, residual, layer.attention_post_norm, layer.mlp_norm, _ATTENTION
        )
        lora = inputs.lora_at(LoraReach.ALL)
        gate_up = adapted_linear(
            gate_up_site, hidden, layer.gate_up, layer.gate_up_bias, lora, pool
        )
        hidden = product_silu_mul(gate_up, self.config.family.activation)
        return adapted_linear(down_site, hidden, layer.down, layer.down_bias, lora, pool), residual

    def finish(self, added: Product, residual: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """Returns [rows whose logits are requested, H], normed."""
        after = self.weights.layers[-1].mlp_post_norm
        if inputs.logit_rows is not None:
            added = Product(added.settle().index_select(0, inputs.logit_rows))
            residual = residual.index_select(0, inputs.logit_rows)
        return self._add(added, residual, after, self.weights.norm, _MLP)[0]

    def _add(
        self,
        added: Product,  # [T, H], by attention or an MLP
        residual: torch.Tensor,
        post_norm: torch.Tensor | None,  # of the added values
        norm: torch.Tensor | None,  # of the sum, for its reader
        kind: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the input of the next block, and the new residual."""
        eps = self.config.rms_norm_eps
        if self.ranks.size > 1:
            if post_norm is None and norm is not None:
                return product_all_reduce_add_rms_norm(
                    self.ranks, added, residual, norm, eps, self.config.residual_multiplier, kind
                )
            added = Product(self.ranks.all_reduce(added.settle()))
        if post_norm is not None:
            return product_norm_add_norm(added, residual, post_norm, norm, eps)
        assert norm is not None
        scale = self.config.residual_multiplier
        return product_add_rms_norm(added, residual, norm, eps, scale)

    def logits(
        self, hidden: torch.Tensor, inputs: ForwardInputs, first: int, pool: AdapterPool
    ) -> torch.Tensor:
        """Turns [R, H] into [R, V] float32. The rows are the step's result from `first`
        on; with a plan of the head's adapters, all rows that sample."""
        logits = self.head_product(hidden)
        if self.ranks.size > 1:  # the last ranks may have fewer tokens
            width = -(-self.config.vocab_size // self.ranks.size)
            logits = pad(logits, (0, width - logits.shape[1]))
        lora = inputs.head_lora
        if isinstance(lora, LoraPlan):
            assert first == 0
            lora_head_(logits, hidden, pool.site_rows(self._head_site.name), lora)
        elif lora is not None and lora.targets(self._head_site.name):
            rows = inputs.host_logit_rows[first : first + hidden.shape[0]]
            apply_lora_(self._head_site, (logits,), hidden, lora.select(rows))
        if self.ranks.size > 1:
            logits = self.ranks.all_gather(logits)[:, : self.config.vocab_size]
        if self.config.logits_scaling != 1.0:
            logits /= self.config.logits_scaling
        if (cap := self.config.logits_soft_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def head_product(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turns [R, H] into the base's logits of this rank's tokens, [R, V / ranks] float32."""
        head = self.weights.head
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Rounded to bf16, logits above 16 are 1/8 apart and greedy choices tie.
            return torch.mm(hidden, head.T, out_dtype=torch.float32)
        return dense_linear(hidden, head).float()

    def embed(self, inputs: ForwardInputs, pool: AdapterPool) -> torch.Tensor:
        token_ids, table, in_flight = inputs.token_ids, self.weights.embedding, inputs.in_flight
        if in_flight is None:
            embedded = embedding(token_ids, table)
        else:
            embedded = gather_embedding(token_ids, in_flight.sources, in_flight.drawn, table)
        lora, site = inputs.lora_at(LoraReach.ALL), self._embedding_site
        if isinstance(lora, LoraPlan):
            if lora.has_embedding:
                assert in_flight is not None
                sources, drawn = in_flight.sources, in_flight.drawn
                rows = pool.site_rows(site.name)
                lora_embed_(embedded, token_ids, sources, drawn, rows, lora)
        elif lora is not None and lora.targets(site.name):
            apply_lora_embedding_(site, embedded, token_ids, lora)
        if self._embedding_multiplier != 1.0:
            embedded *= self._embedding_multiplier
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
        """Returns the rotated q [T, Hq, D]; K and V are then in the cache."""
        config, layer, site = self.config, self.weights.layers[index], self._layer_sites[index][0]
        qkv = adapted_linear(site, hidden, layer.qkv, layer.qkv_bias, inputs.lora, pool)
        q_norm, k_norm = layer.q_norm, layer.k_norm
        if self.ranks.size > 1 and config.family.qk_norm == "all":
            self._norm_all_heads_(qkv.settle(), layer)
            qkv, q_norm, k_norm = Product(qkv.base), None, None
        write = RopeWrite(
            inputs.positions,
            self._cos_sin[index],
            kv.k[index],
            kv.v[index],
            inputs.slots[kv.table_of[index]],
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            q_norm,
            k_norm,
            config.rms_norm_eps,
            out,
            self._q_scaling[index],
        )
        return product_rope_kv_write(qkv, write)

    def _norm_all_heads_(self, qkv: torch.Tensor, layer: LayerWeights) -> None:
        """Norms q, and k, over the heads of all ranks, which have equally many: a head of several
        ranks counts as often for each of them."""
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q_size, eps = self.config.q_size, self.config.rms_norm_eps
        parts = qkv[:, :q_size], qkv[:, q_size : q_size + self.config.kv_size]
        rms_norm_of_ranks_(parts, (layer.q_norm, layer.k_norm), eps, self.ranks)


def _cos_sin(
    rope: RopeConfig | None, config: ModelConfig, weights: Weights, max_len: int
) -> torch.Tensor | None:
    if rope is None:
        return None
    return cos_sin_table(rope, config.head_dim, max_len).to(weights.embedding.device)


def _kind_of(weight: object) -> object:
    """Returns the part of a weight that its kernels depend on: forms and types, no numbers."""
    if isinstance(weight, torch.Tensor):
        return weight.shape, weight.dtype
    if is_dataclass(weight):
        return type(weight), *(_kind_of(getattr(weight, one.name)) for one in fields(weight))
    return weight


def _query_scaling(rope: RopeConfig | None) -> QueryScaling | None:
    if rope is None or not rope.query_beta:
        return None
    return QueryScaling(rope.query_beta, rope.original_max_len)
