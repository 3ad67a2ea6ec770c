"""The flags of open_clip that may be published. A flag that is not listed, such as a new one, stays private.

No flag listed here names a place, a machine or a person. Those of `pcmepp train` alone say so in their rows.
"""

PUBLISHED = (
    # the model
    *("model", "pretrained", "pretrained_image", "precision", "grad_checkpointing", "torchcompile", "torchscript"),
    *("force_context_length", "force_custom_text", "force_image_size", "force_patch_dropout", "force_quick_gelu"),
    *("lock_image", "lock_image_freeze_bn_stats", "lock_image_unlocked_groups"),
    *("lock_text", "lock_text_freeze_layer_norm", "lock_text_unlocked_layers", "use_bn_sync", "use_bnb_linear"),
    # the loss
    *("siglip", "loss_dist_impl", "local_loss", "gather_with_grad", "distill_model", "distill_pretrained"),
    *("coca_caption_loss_weight", "coca_contrastive_loss_weight"),
    # the optimizer
    *("opt", "lr", "beta1", "beta2", "eps", "wd", "momentum", "grad_clip_norm"),
    *("warmup", "skip_scheduler", "lr_scheduler", "lr_cooldown_end", "lr_cooldown_power", "epochs_cooldown"),
    # the ranks
    *("batch_size", "accum_freq", "epochs", "seed", "workers", "world_size", "ddp_static_graph", "horovod"),
    # the data
    *("aug_cfg", "image_mean", "image_std", "image_interpolation", "image_resize_mode", "dataset_type"),
    *("dataset_resampled", "train_num_samples", "val_num_samples", "val_frequency", "zeroshot_frequency"),
    "train_data_upsampling_factors",
)

MODEL_NAMES = ("opt", "model", "pretrained", "distill_pretrained")  # their values may have a slash, or be a path

# Flags that determine the parameters: a run cannot be resumed with another value.
FIXED = (
    *("model", "opt", "siglip", "force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length"),
    *("lock_image", "lock_image_unlocked_groups", "lock_text", "lock_text_unlocked_layers"),
)
# Flags that only matter at the start of a run.
AT_START = ("pretrained", "pretrained_image", "init_match_scale", "init_match_shift", "init_logvar_bias")
