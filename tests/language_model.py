"""A small causal language model on this package's attention, and text for it: sums that count on, padded."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mha_ext

VOCABULARY, WIDTH, HEADS = 11, 16, 4


class Layer(nn.Module):
    def __init__(self, dropout, attention=mha_ext.nn.MultiheadAttention):
        super().__init__()
        self.attention = attention(WIDTH, HEADS, dropout, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, padding):
        h = self.norms[0](x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(
            1
        )  # torch's module wants it beside is_causal
        x = x + self.attention(h, h, h, padding, need_weights=False, attn_mask=hidden, is_causal=True)[0]
        return x + self.feed_forward(self.norms[1](x))


class LanguageModel(nn.Module):
    """Next-token loss of ``tokens (B, L)``, of which each entry has ``lengths (B,)``."""

    def __init__(self, dropout=0.0, layers=2, dtype=torch.float64, attention=mha_ext.nn.MultiheadAttention):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(dropout, attention) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.to(dtype)

    def logits(self, tokens, lengths):
        padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(x), padding

    def forward(self, tokens, lengths):
        logits, padding = self.logits(tokens[:, :-1], lengths - 1)
        target = tokens[:, 1:].masked_fill(padding, -100)
        return cross_entropy(logits.transpose(1, 2), target)


def text(batch=4, length=9):
    """Tokens that step by 1, 2 or 3, modulo the vocabulary; every second entry ends early."""
    start, step = torch.arange(batch)[:, None], torch.arange(batch)[:, None] % 3 + 1
    tokens = (start + step * torch.arange(length)) % VOCABULARY
    return tokens, torch.tensor([length - 3 * (n % 2) for n in range(batch)])


def losses(model, batches, call=None, rate=0.05):
    """Loss before each step of SGD, one step for each batch, by ``call(tokens, lengths)``, by default the model."""
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    seen = []
    for tokens, lengths in batches:
        loss = (model if call is None else call)(tokens, lengths)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seen.append(loss.detach())
    return torch.stack(seen)
