"""Independent VQGANs, written out in the layouts of the published checkpoints, to compare converted ones with."""

from torch import nn


def norm(channels):
    return nn.GroupNorm(32, channels, eps=1e-6)


class Block(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.norm1, self.conv1 = norm(a), nn.Conv2d(a, b, 3, padding=1)
        self.norm2, self.conv2 = norm(b), nn.Conv2d(b, b, 3, padding=1)
        if a != b:
            self.nin_shortcut = nn.Conv2d(a, b, 1)

    def forward(self, x):
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        h = self.conv2(nn.functional.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = norm(c)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(c, c, 1) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2) for layer in (self.q, self.k, self.v))
        weights = (q.transpose(1, 2) @ k * q.shape[1] ** -0.5).softmax(-1)
        return x + self.proj_out((v @ weights.transpose(1, 2)).view_as(x))


class Resize(nn.Module):
    def __init__(self, c, stride):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, stride=stride, padding=1 if stride == 1 else 0)


class Level(nn.Module):
    def __init__(self, widths, resize):
        super().__init__()
        self.block = nn.ModuleList(Block(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.attn = nn.ModuleList()
        if resize is not None:
            name, module = resize
            setattr(self, name, module)


class Middle(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_1, self.attn_1, self.block_2 = Block(c, c), Attention(c), Block(c, c)

    def forward(self, x):
        return self.block_2(self.attn_1(self.block_1(x)))


class Vqgan(nn.Module):
    """Widths of the levels from the finest on; `blocks` a level when encoding, one more when decoding."""

    def __init__(self, codes, widths=(32, 32, 64, 64, 64), blocks=1, z=32):
        super().__init__()
        top, n = widths[-1], len(widths)
        self.encoder, self.decoder, self.quantize = nn.Module(), nn.Module(), nn.Module()
        self.encoder.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        ins = (widths[0], *widths[:-1])
        self.encoder.down = nn.ModuleList(
            Level([ins[i]] + [widths[i]] * blocks, ("downsample", Resize(widths[i], 2)) if i < n - 1 else None)
            for i in range(n)
        )
        self.encoder.mid, self.encoder.norm_out = Middle(top), norm(top)
        self.encoder.conv_out = nn.Conv2d(top, z, 3, padding=1)
        self.decoder.conv_in = nn.Conv2d(z, top, 3, padding=1)
        self.decoder.mid = Middle(top)
        above = (*widths[1:], top)
        self.decoder.up = nn.ModuleList(
            Level([above[i]] + [widths[i]] * (blocks + 1), ("upsample", Resize(widths[i], 1)) if i else None)
            for i in range(n)
        )
        self.decoder.norm_out = norm(widths[0])
        self.decoder.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)
        self.quantize.embedding = nn.Embedding(codes, z)
        self.quant_conv, self.post_quant_conv = nn.Conv2d(z, z, 1), nn.Conv2d(z, z, 1)

    def decode(self, codes):
        h = self.post_quant_conv(self.quantize.embedding(codes).permute(0, 3, 1, 2))
        h = self.decoder.mid(self.decoder.conv_in(h))
        for level in reversed(self.decoder.up):
            for block in level.block:
                h = block(h)
            if hasattr(level, "upsample"):
                h = level.upsample.conv(nn.functional.interpolate(h, scale_factor=2.0))
        return self.decoder.conv_out(nn.functional.silu(self.decoder.norm_out(h)))


class LlamaGenLevel(nn.Module):
    def __init__(self, widths, attends, resize):
        super().__init__()
        self.res = nn.ModuleList(Block(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.attn = nn.ModuleList(Attention(b) for b in widths[1:] if attends)
        if resize is not None:
            name, module = resize
            setattr(self, name, module)


class LlamaGenVq(nn.Module):
    """LlamaGen's tokenizer: decoding levels from the coarsest on, attention in the deepest, normalised codes."""

    def __init__(self, codes, widths=(32, 32, 64, 64, 64), blocks=1, z=32, width=8):
        super().__init__()
        top, n = widths[-1], len(widths)
        self.encoder, self.decoder, self.quantize = nn.Module(), nn.Module(), nn.Module()
        self.encoder.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        ins = (widths[0], *widths[:-1])
        self.encoder.conv_blocks = nn.ModuleList(
            LlamaGenLevel(
                [ins[i]] + [widths[i]] * blocks,
                i == n - 1,
                ("downsample", Resize(widths[i], 2)) if i < n - 1 else None,
            )
            for i in range(n)
        )
        self.encoder.mid = nn.ModuleList([Block(top, top), Attention(top), Block(top, top)])
        self.encoder.norm_out, self.encoder.conv_out = norm(top), nn.Conv2d(top, z, 3, padding=1)
        self.decoder.conv_in = nn.Conv2d(z, top, 3, padding=1)
        self.decoder.mid = nn.ModuleList([Block(top, top), Attention(top), Block(top, top)])
        down = widths[::-1]
        before = (top, *down[:-1])
        self.decoder.conv_blocks = nn.ModuleList(
            LlamaGenLevel(
                [before[i]] + [down[i]] * (blocks + 1),
                i == 0,
                ("upsample", Resize(down[i], 1)) if i < n - 1 else None,
            )
            for i in range(n)
        )
        self.decoder.norm_out, self.decoder.conv_out = norm(widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.quantize.embedding = nn.Embedding(codes, width)
        self.quant_conv, self.post_quant_conv = nn.Conv2d(z, width, 1), nn.Conv2d(width, z, 1)

    def decode(self, codes):
        vectors = nn.functional.normalize(self.quantize.embedding.weight, dim=-1)[codes]
        h = self.decoder.conv_in(self.post_quant_conv(vectors.permute(0, 3, 1, 2)))
        for layer in self.decoder.mid:
            h = layer(h)
        for level in self.decoder.conv_blocks:
            for k, block in enumerate(level.res):
                h = block(h)
                if len(level.attn):
                    h = level.attn[k](h)
            if hasattr(level, "upsample"):
                h = level.upsample.conv(nn.functional.interpolate(h, scale_factor=2.0))
        return self.decoder.conv_out(nn.functional.silu(self.decoder.norm_out(h)))
