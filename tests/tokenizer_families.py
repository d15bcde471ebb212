"""Small tokenizers of the families that are served, trained on a few lines, and texts that are hard on tokenizers."""

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's 1234567 o'clock.",
    "def main(argv):\n    return [x ** 2 for x in range(10)]  # squares\n\n\nif __name__ == '__main__':\n\tmain([])",
    "Über die Straße geht ein Mädchen. C'est déjà l'été où l'élève naïf a mangé un gâteau.",
    "日本語のテキストと漢字、中文文本。 Привет, мир! Γειά σου Κόσμε. مرحبا بالعالم. שלום",
    "we will, we'll, they've, I'm, he'd, YOU'RE; 10% of 3.14159 = 0.314159 and 1/2 + 1/3.",
    "system user assistant tool hello world again and again: hello hello, the answer is forty two.",
] * 4

TEXTS = [
    "", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "a", " a", "a ", "  a  b   c    ", "A\nB\n\nC\n\n\nD",
    "\n a", "a \n b",
    "Hello, world!", "hello world", "HELLO WORLD", "HelloWorld helloWorld hello_world", "The quick brown fox",
    "don't won't it's they've I'll he'd you're", "DON'T IT'S THEY'VE", "’s curly ’t quotes “x” ‘y’", "'s 't", "a's'b",
    "0", "1", "12", "123", "1234", "1234567890", "1 2 3", "3.14159", "1,000,000", "2024-01-31T23:59:59Z", "v1.2.3-rc4",
    "0x1F", "１２３ full width", "½ ¼ ²³ ⅷ ①", "٣٤٥", "x1y22z333", " 42", "42 ", "1st 2nd 3rd", "100%", "$9.99 €5 £3",
    "é", "e\u0301", "naïve café", "Straße", "ﬁne ligature", "Ω Ω", "ÀÉÎÕÜ", "İstanbul ıstanbul",
    "日本語", "漢字かな交じり文", "中文，标点。", "한국어 문장",
    "Привет, мир", "Γειά σου", "مرحبا بالعالم", "שלום עולם", "ไทย", "हिन्दी",
    "👍", "👍🏽 👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "a👍b", "\u200b\u200d\ufeff", "\u00a0nbsp\u3000wide", "\ufffd", "\U0001d49c",
    "def f(x):\n    return x+1\n", "\tif (a && b) {\n\t\treturn;\n\t}\n", "<html><body>&amp;</body></html>",
    "{\"a\": [1, 2.5, null], \"b\": \"c\\n\"}", "SELECT * FROM t WHERE x >= 10;", "C:\\path\\file.txt", "/usr/bin",
    "https://example.org/a?b=c&d=%20#e", "user@example.com", "a-b--c---d", "...!!!???", "***bold*** _it_ `code`",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?", "~~ ~~", "#hashtag @mention", "(((nested)))", "\\n \\t \\\\", "'\"'\"",
    "   leading", "trailing   ", "in   between", "\n\n  \n\t\n", "x" * 100, "ab" * 60, " " * 50, "\n" * 20, "a " * 40,
    "▁ a real ▁ block", "<0x0A> <0xE2>", "supercalifragilisticexpialidocious", "The year 1999 and 2001, 50/50.",
]  # fmt: skip
"""More than eighty."""


def byte_level(
    split: Any = None, *, specials: tuple[str, ...] = (), plain_added: tuple[str, ...] = (), bos: str | None = None
) -> tokenizers.Tokenizer:
    """Byte-level BPE. `split`: a pre-tokenizer before the byte spelling; None: GPT-2's. `bos`: written by a
    post-processor, as in Llama 3. Added tokens follow the vocabulary."""
    backend = tokenizers.Tokenizer(models.BPE())
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = spelling if split is None else pre_tokenizers.Sequence([split, spelling])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain_added])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


def llama3_split() -> Any:
    return pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary as a GGUF holds it."""

    tokens: list[str]
    scores: list[float]
    types: list[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}


def sentencepiece_pieces(added: tuple[str, ...] = ()) -> Pieces:
    """<unk>, <s>, </s>, control tokens, 256 byte tokens, merged pieces with falling scores, characters."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500))
    learned = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda entry: entry[1])]
    merged, chars = [t for t in learned if len(t) > 1], [t for t in learned if len(t) == 1]
    control = ["<unk>", "<s>", "</s>", *added]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *chars]
    scores = [0.0] * (len(control) + 256) + [-float(n) for n in range(len(merged) + len(chars))]
    types = [2] + [3] * (len(control) - 1) + [6] * 256 + [1] * (len(merged) + len(chars))
    return Pieces(tokens, scores, types)


def sentencepiece(pieces: Pieces, merges: list[tuple[str, str]], *, legacy: bool) -> tokenizers.Tokenizer:
    """As in tokenizer.json of Llama 2 and Mistral, BOS from a post-processor.
    `legacy`: a space before each piece between control tokens."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=pieces.ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    control = [t for t, kind in zip(pieces.tokens, pieces.types, strict=True) if kind in (2, 3)]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend
