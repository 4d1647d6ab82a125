"""An EAGLE-3 head and its target in float64, from the formulas: what it drafts behind a context."""

import json
import math

import numpy as np
from safetensors.numpy import load_file

NO_DRAFT = -1e9


class Reference:
    """Of two directories with Llama's names; the target has no biases and no scaled rotation."""

    def __init__(self, target, head):
        self.target, self.head = ({"config": json.loads((d / "config.json").read_text())} for d in (target, head))
        for side, directory in ((self.target, target), (self.head, head)):
            weights = load_file(directory / "model.safetensors")
            side |= {n: w if w.dtype == np.int64 else w.astype(np.float64) for n, w in weights.items()}
        count = self.target["config"]["num_hidden_layers"]
        behind = self.head["config"].get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        self.layers = [2, count // 2, count - 3] if behind is None else sorted(i + 1 for i in behind)

    def target_forward(self, ids):
        """Logits [T, V] behind each token, and the reduced hidden states [T, d] that the head takes."""
        w, entering = self.target, []
        x = w["model.embed_tokens.weight"][ids]
        for i in range(w["config"]["num_hidden_layers"]):
            entering.append(x)
            at = f"model.layers.{i}"
            normed = norm(w, x, f"{at}.input_layernorm")
            q, k, v = projected(w, normed, at, np.arange(len(ids)))
            x = x + attended(q, k, v) @ w[f"{at}.self_attn.o_proj.weight"].T
            x = x + mlp(w, norm(w, x, f"{at}.post_attention_layernorm"), at)
        table = "model.embed_tokens.weight" if w["config"]["tie_word_embeddings"] else "lm_head.weight"
        captured = np.concatenate([entering[i] for i in self.layers], axis=-1)
        return norm(w, x, "model.norm") @ w[table].T, captured @ self.head["fc.weight"].T

    def head_forward(self, next_ids, hidden, first, past=None):
        """Outputs [T, d] of the places from `first` on, and the keys and values of these and of `past`."""
        w, at = self.head, "midlayer"
        table = w.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])
        x = np.concatenate(
            [norm(w, table[next_ids], f"{at}.input_layernorm"), norm(w, hidden, f"{at}.hidden_norm")], -1
        )
        q, k, v = projected(w, x, at, first + np.arange(len(next_ids)))
        if past is not None:
            k, v = np.concatenate([past[0], k]), np.concatenate([past[1], v])
        hidden = hidden + attended(q, k, v) @ w[f"{at}.self_attn.o_proj.weight"].T
        return hidden + mlp(w, norm(w, hidden, f"{at}.post_attention_layernorm"), at), (k, v)

    def head_logits(self, hidden):
        """[T, V] over the target's ids."""
        w = self.head
        logits = norm(w, hidden, "norm") @ w.get("lm_head.weight", self.target["model.embed_tokens.weight"]).T
        out = np.full((len(hidden), w["config"]["vocab_size"]), NO_DRAFT)
        for i, offset in enumerate(w.get("d2t", [0] * logits.shape[1])):
            out[:, i + offset] = logits[:, i]
        return out

    def drafts(self, ids, reduced, count, bias):
        """The `count` tokens drafted behind `ids`, of which the last is not in the cache yet; `reduced` are the hidden
        states of at least the others. Also how far the likeliest was ahead of the next, at the least."""
        n = len(ids) - 1
        hidden, past = self.head_forward(ids[1:], reduced[:n], 0)
        out, lead = [], math.inf
        while True:
            scores = self.head_logits(hidden[-1:])[0] + bias
            out.append(int(scores.argmax()))
            lead = min(lead, np.diff(np.sort(scores)[-2:])[0])
            if len(out) == count:
                return out, lead
            hidden, past = self.head_forward(out[-1:], hidden[-1:], n - 1 + len(out), past)


def norm(w, x, name):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + w["config"]["rms_norm_eps"]) * w[f"{name}.weight"]


def mlp(w, x, at):
    gate, up = x @ w[f"{at}.mlp.gate_proj.weight"].T, x @ w[f"{at}.mlp.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T


def projected(w, x, at, positions):
    hd = w["config"]["head_dim"]
    q, k, v = ((x @ w[f"{at}.self_attn.{p}_proj.weight"].T).reshape(len(x), -1, hd) for p in "qkv")
    angles = positions[:, None, None] * w["config"]["rope_theta"] ** (-2 * np.arange(hd // 2) / hd)

    def rotated(y):
        pairs = (y[..., : hd // 2] + 1j * y[..., hd // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    return rotated(q), rotated(k), v


def attended(q, k, v):
    """q [T, H, D] are the last T of the places of k and v [S, K, D] -> [T, H * D]."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    hidden = np.arange(len(k))[None] > np.arange(len(k) - len(q), len(k))[:, None]
    weights = np.exp(np.where(hidden, -np.inf, scores))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)
