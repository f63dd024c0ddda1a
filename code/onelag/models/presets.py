"""Models by name. The SmolLM2 sizes are those of the paper. The small and the large ones are ours: the paper's own 2B and 10B mixtures are not public."""

from onelag.models.dense import DenseConfig
from onelag.models.moe import MoEConfig

SMOLLM2_VOCABULARY = 49152

PRESETS: dict[str, DenseConfig] = {
    "byte-0.3m": DenseConfig(vocab_size=256, num_layers=3, width=96, num_heads=3, num_kv_heads=1, ffn_width=256),
    "byte-2m": DenseConfig(vocab_size=256, num_layers=6, width=192, num_heads=6, num_kv_heads=2, ffn_width=512),
    "10m": DenseConfig(vocab_size=4096, num_layers=9, width=288, num_heads=9, num_kv_heads=3, ffn_width=768, max_length=2048),
    "30m": DenseConfig(vocab_size=8192, num_layers=16, width=384, num_heads=6, num_kv_heads=2, ffn_width=1024, max_length=2048),
    "smollm2-135m": DenseConfig(vocab_size=49152, num_layers=30, width=576, num_heads=9, num_kv_heads=3, ffn_width=1536, max_length=2048),
    "smollm2-360m": DenseConfig(vocab_size=49152, num_layers=32, width=960, num_heads=15, num_kv_heads=5, ffn_width=2560, max_length=2048),
    # From here on: as many layers as give equal pipeline stages, where the head has the work of one to three layers.
    "dense-1b": DenseConfig(
        vocab_size=SMOLLM2_VOCABULARY, num_layers=22, width=2048, num_heads=16, num_kv_heads=4, ffn_width=5632, max_length=2048
    ),
    "dense-10b": DenseConfig(
        vocab_size=SMOLLM2_VOCABULARY,
        num_layers=47,
        width=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_width=13056,
        max_length=2048,
        tie_embeddings=False,
    ),
    # The mixtures: 64 fine-grained experts of which a token takes 6, one shared; the first layer is dense, as wide as what a token takes elsewhere and more.
    "moe-2b": MoEConfig(
        vocab_size=SMOLLM2_VOCABULARY,
        num_layers=25,
        width=1024,
        num_heads=16,
        num_kv_heads=4,
        ffn_width=4096,
        max_length=2048,
        tie_embeddings=False,
        num_experts=64,
        experts_per_token=6,
        expert_width=384,
        route_scale=6**0.5,
    ),
    "moe-10b": MoEConfig(
        vocab_size=SMOLLM2_VOCABULARY,
        num_layers=30,
        width=2048,
        num_heads=16,
        num_kv_heads=4,
        ffn_width=8192,
        max_length=2048,
        tie_embeddings=False,
        num_experts=64,
        experts_per_token=6,
        expert_width=832,
        route_scale=6**0.5,
    ),
    # The 10B mixture's depth, experts and code path at a width that two CPU cores can train, for rehearsals.
    "moe-narrow": MoEConfig(
        vocab_size=256,
        num_layers=30,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=256,
        max_length=512,
        tie_embeddings=False,
        num_experts=64,
        experts_per_token=6,
        expert_width=16,
        route_scale=6**0.5,
    ),
}
