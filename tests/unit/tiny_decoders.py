"""Small decoders that return what real ones return, and their sites worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 32


class Norm(nn.Module):
    """RMS norm; given a residual too, vLLM's fused one, which overwrites both of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self.by_hand(x)
        residual.add_(x)
        x.copy_(self.by_hand(residual))
        return x, residual

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.float().pow(2).mean(-1, keepdim=True).rsqrt().to(x.dtype) * self.weight


class PassingNorm(Norm):
    """Cohere's norm in vLLM: it takes a residual only to hand it back."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return self.by_hand(x), residual


class Attention(nn.Module):
    """Mixes each row with those before it; returns weights beside its output where asked to."""

    def __init__(self, returns_weights: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.returns_weights = returns_weights

    def forward(self, hidden_states: torch.Tensor) -> Any:
        output = self.by_hand(hidden_states)
        return (output, None) if self.returns_weights else output

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None].to(x.dtype))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_hand(x)

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.proj(x))


class Layer(nn.Module):
    """Pre-norm, attention then MLP, one tensor in and out."""

    fused = False

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm()
        self.mlp = Mlp()

    def forward(self, h: torch.Tensor) -> Any:
        h = h + self.self_attn(self.input_layernorm(h))
        return h + self.mlp(self.post_attention_layernorm(h))

    def by_hand(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        attn = self.self_attn.by_hand(self.input_layernorm.by_hand(h))
        mid = h + attn
        mlp = self.mlp.by_hand(self.post_attention_layernorm.by_hand(mid))
        return points(h, attn, mid, mlp, mid + mlp)


class ThenNone(Layer):
    """Older Transformers: a tuple that ends in None."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention(returns_weights=True)

    def forward(self, h: torch.Tensor) -> Any:
        attn, _ = self.self_attn(hidden_states=self.input_layernorm(h))
        h = h + attn
        return h + self.mlp(self.post_attention_layernorm(h)), None


class Fused(Layer):
    """vLLM's usual layer: the sum of what it returns is the stream, added by the next norm."""

    fused = True

    def forward(self, positions: torch.Tensor, h: torch.Tensor, residual: Any) -> Any:
        if residual is None:
            residual = h
            h = self.input_layernorm(h)
        else:
            h, residual = self.input_layernorm(h, residual)
        h, residual = self.post_attention_layernorm(self.self_attn(h), residual)
        return self.mlp(h), residual


class FusedThree(Fused):
    """As `Fused`, with a third tensor of the same shape that is no part of the stream."""

    def forward(self, positions: torch.Tensor, h: torch.Tensor, residual: Any) -> Any:
        h, residual = super().forward(positions, h, residual)
        return h, residual, torch.full_like(h, 100.0)


class FinishedSerial(Layer):
    """vLLM's stablelm: a finished stream, beside the one between its sublayers."""

    fused = True

    def forward(self, positions: torch.Tensor, h: torch.Tensor, residual: Any) -> Any:
        middle = h + self.self_attn(self.input_layernorm(h))
        return middle + self.mlp(self.post_attention_layernorm(middle)), middle


class FinishedParallel(Layer):
    """vLLM's cohere: a finished stream beside the one before it; one norm serves both sublayers."""

    fused = True

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = PassingNorm()
        del self.post_attention_layernorm

    def forward(self, positions: torch.Tensor, h: torch.Tensor, residual: Any) -> Any:
        normed, residual = self.input_layernorm(h, h)
        return residual + self.self_attn(normed) + self.mlp(normed), residual

    def by_hand(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        normed = self.input_layernorm.by_hand(h)
        attn, mlp = self.self_attn.by_hand(normed), self.mlp.by_hand(normed)
        return points(h, attn, None, mlp, h + attn + mlp)


class Parallel(Layer):
    """GPT-NeoX's: each sublayer has a norm of its own on the same input."""

    def forward(self, h: torch.Tensor) -> Any:
        attn = self.self_attn(self.input_layernorm(h))
        return h + attn + self.mlp(self.post_attention_layernorm(h))

    def by_hand(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        attn = self.self_attn.by_hand(self.input_layernorm.by_hand(h))
        mlp = self.mlp.by_hand(self.post_attention_layernorm.by_hand(h))
        return points(h, attn, None, mlp, h + attn + mlp)


class ThreeElements(Layer):
    """A router's logits beside the stream."""

    def forward(self, h: torch.Tensor) -> Any:
        return super().forward(h), None, torch.ones(len(h), 4, dtype=h.dtype)


class FourElements(Layer):
    """Attention weights, a cache and indices beside the stream."""

    def forward(self, h: torch.Tensor) -> Any:
        rows = len(h)
        weights = torch.ones(rows, rows, dtype=h.dtype)
        return super().forward(h), weights, (h, h), torch.zeros(rows, WIDTH, dtype=torch.int64)


class Sandwich(Layer):
    """gemma2's: a norm after each sublayer as well; what is added is that norm's output."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_feedforward_layernorm = Norm()
        self.post_feedforward_layernorm = Norm()

    def forward(self, h: torch.Tensor) -> Any:
        h = h + self.post_attention_layernorm(self.self_attn(self.input_layernorm(h)))
        return h + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(h)))

    def by_hand(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        attn = self.self_attn.by_hand(self.input_layernorm.by_hand(h))
        attn = self.post_attention_layernorm.by_hand(attn)
        mid = h + attn
        mlp = self.mlp.by_hand(self.pre_feedforward_layernorm.by_hand(mid))
        mlp = self.post_feedforward_layernorm.by_hand(mlp)
        return points(h, attn, mid, mlp, mid + mlp)


class FusedSandwich(Sandwich):
    """gemma2's in vLLM: the norm before the MLP adds, the one after it doesn't."""

    fused = True

    def forward(self, positions: torch.Tensor, h: torch.Tensor, residual: Any) -> Any:
        if residual is None:
            residual = h
            h = self.input_layernorm(h)
        else:
            h, residual = self.input_layernorm(h, residual)
        h = self.post_attention_layernorm(self.self_attn(h))
        h, residual = self.pre_feedforward_layernorm(h, residual)
        return self.post_feedforward_layernorm(self.mlp(h)), residual


class PostNorm(Layer):
    """olmo2's: no norm before a sublayer, one after it."""

    def __init__(self) -> None:
        super().__init__()
        del self.input_layernorm
        self.post_feedforward_layernorm = Norm()

    def forward(self, h: torch.Tensor) -> Any:
        h = h + self.post_attention_layernorm(self.self_attn(h))
        return h + self.post_feedforward_layernorm(self.mlp(h))

    def by_hand(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        attn = self.post_attention_layernorm.by_hand(self.self_attn.by_hand(h))
        mid = h + attn
        mlp = self.post_feedforward_layernorm.by_hand(self.mlp.by_hand(mid))
        return points(h, attn, mid, mlp, mid + mlp)


class Scaled(Layer):
    """granite's: what a sublayer returns is multiplied before it is added."""

    multiplier = 0.22

    def forward(self, h: torch.Tensor) -> Any:
        h = h + self.multiplier * self.self_attn(self.input_layernorm(h))
        return h + self.multiplier * self.mlp(self.post_attention_layernorm(h))

    def by_hand(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return points(h, None, None, None, self.forward(h))


class ScaledTwo(Scaled):
    """As `Scaled`, with a second tensor of the stream's shape: to be added or not?"""

    def forward(self, h: torch.Tensor, residual: Any = None) -> Any:
        return super().forward(h), h


class FinishedBesideZeros(Layer):
    """A finished stream beside zeros: to add them or not gives the same."""

    def forward(self, h: torch.Tensor) -> Any:
        return super().forward(h), torch.zeros_like(h)


class Decoder(nn.Module):
    """`layers` as given, between an embedding and a final norm."""

    embedding_scale = 1.0

    def __init__(self, layers: list[Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm = Norm()
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h, residual = self.embed(tokens) * self.embedding_scale, None
        for layer in self.layers:
            out = layer(torch.arange(len(tokens)), h, residual) if layer.fused else layer(h)
            h, residual = out[:2] if layer.fused else (stream(out), None)
        if residual is not None and isinstance(self.layers[0], Fused | FusedSandwich):
            return self.norm(h, residual)[0]
        return self.norm(h)

    def by_hand(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every site that the decoder has, by name; nothing of it runs through `forward`."""
        h = self.embed.weight[tokens]
        found = {"embed": h}
        for index, layer in enumerate(self.layers):
            at = layer.by_hand(h)
            found |= {f"{point}.{index}": values for point, values in at.items()}
            h = at["resid_post"]
        return found | {"final_norm": self.norm.by_hand(h)}


def stream(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def points(pre: Any, attn: Any, mid: Any, mlp: Any, post: Any) -> dict[str, torch.Tensor]:
    names = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
    found = dict(zip(names, (pre, attn, mid, mlp, post), strict=True))
    return {name: values for name, values in found.items() if values is not None}
