"""Models by name. The SmolLM2 sizes are those of the paper; the small ones are ours, in the same proportions."""

from onelag.models.dense import DenseConfig

PRESETS: dict[str, DenseConfig] = {
    "byte-0.3m": DenseConfig(vocab_size=256, num_layers=3, width=96, num_heads=3, num_kv_heads=1, ffn_width=256),
    "byte-2m": DenseConfig(vocab_size=256, num_layers=6, width=192, num_heads=6, num_kv_heads=2, ffn_width=512),
    "10m": DenseConfig(vocab_size=4096, num_layers=9, width=288, num_heads=9, num_kv_heads=3, ffn_width=768, max_length=2048),
    "30m": DenseConfig(vocab_size=8192, num_layers=16, width=384, num_heads=6, num_kv_heads=2, ffn_width=1024, max_length=2048),
    "smollm2-135m": DenseConfig(vocab_size=49152, num_layers=30, width=576, num_heads=9, num_kv_heads=3, ffn_width=1536, max_length=2048),
    "smollm2-360m": DenseConfig(vocab_size=49152, num_layers=32, width=960, num_heads=15, num_kv_heads=5, ffn_width=2560, max_length=2048),
}
