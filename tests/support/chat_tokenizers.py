"""Small tokenizers of the usual kinds, each with a token that begins a message and one that ends it."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BEGIN, END = "<|im_start|>", "</s>"
LETTERS = "abcdefghijklmnopqrstuvwxyz<>/|_!▁0123456789"


def added(text: str, *, special: bool = True, normalized: bool = False) -> AddedToken:
    return AddedToken(text, special=special, normalized=normalized)


def byte_level(*more: AddedToken) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_tokens(tokenizer, added(BEGIN), added(END), *more)


def byte_fallback() -> Tokenizer:
    """As Llama 2: the ends of texts are pieces of the model, too."""
    pieces = ["<unk>", "<s>", END, *[f"<0x{i:02X}>" for i in range(256)], *LETTERS, "▁a"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_tokens(tokenizer, added("<unk>"), added(BEGIN), added(END))


def unigram() -> Tokenizer:
    """As T5: the best pieces are special tokens, and normalised text may spell them."""
    pieces = [("<pad>", 0.0), (END, 0.0), ("<unk>", 0.0), (BEGIN, 0.0), *[(letter, -5.0) for letter in LETTERS]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return with_tokens(tokenizer, added("<pad>"), added(END), added("<unk>"), added(BEGIN))


def word_piece() -> Tokenizer:
    """As BERT, in small letters; it knows some special tokens only once the text is normalised."""
    words = ["[UNK]", *LETTERS, *[f"##{letter}" for letter in LETTERS]]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return with_tokens(tokenizer, added("[UNK]"), added(BEGIN, normalized=True), added(END, normalized=True))


def with_tokens(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    tokenizer.add_tokens([token for token in tokens if not token.special])
    tokenizer.add_special_tokens([token for token in tokens if token.special])
    return tokenizer
