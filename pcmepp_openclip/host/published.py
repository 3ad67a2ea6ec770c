"""The flags of a run that may be published. A flag that is not listed, such as a new one of open_clip, stays private.

No flag listed here names a place, a machine or a person.
"""

PUBLISHED = (
    # the model
    *("model", "pretrained", "pretrained_image", "precision", "grad_checkpointing", "torchcompile", "torchscript"),
    *("force_context_length", "force_custom_text", "force_image_size", "force_patch_dropout", "force_quick_gelu"),
    *("lock_image", "lock_image_freeze_bn_stats", "lock_image_unlocked_groups"),
    *("lock_text", "lock_text_freeze_layer_norm", "lock_text_unlocked_layers"),
    *("head_only", "lora", "use_bn_sync", "use_bnb_linear"),
    # the loss
    *("siglip", "loss_dist_impl", "local_loss", "gather_with_grad", "distill_model", "distill_pretrained"),
    *("chunked_clip_loss", "coca_caption_loss_weight", "coca_contrastive_loss_weight"),
    # the optimizer
    *("opt", "lr", "beta1", "beta2", "eps", "wd", "momentum", "grad_clip_norm"),
    *("opt_kwargs", "layer_decay", "image_lr_multiplier", "text_lr_multiplier", "lr_drop_epochs", "lr_drop_factor"),
    *("freeze_image_epochs", "freeze_text_epochs", "warm_up_after_freeze", "swa_start_epoch"),
    *("warmup", "skip_scheduler", "lr_scheduler", "lr_cooldown_end", "lr_cooldown_power", "epochs_cooldown"),
    # the ranks
    *("global_batch_size", "batch_size", "accum_freq", "epochs", "seed", "workers", "world_size"),
    *("ddp_static_graph", "horovod"),
    # the data
    *("aug_cfg", "image_mean", "image_std", "image_interpolation", "image_resize_mode", "dataset_type"),
    *("dataset_resampled", "train_num_samples", "val_num_samples", "val_frequency", "zeroshot_frequency"),
    *("train_data_mix", "train_data_upsampling_factors", "train_data_shuffle_buffer", "no_trim_captions"),
    *("captions", "captions_per_image", "multi_positives", "noise_ratio", "noise_seed", "noise_per_caption"),
    *("train_data_max_bad_fraction", "train_data_max_empty_shards", "train_data_max_pixels", "train_data_retries"),
    *("train_data_exif_orientation", "train_data_decoding", "crop_sides", "flip"),
    *("mixup", "cutmix", "mix_share", "mix_mode", "mix_switch_prob", "caption_augment", "caption_cut"),
    *("cut_images", "objective"),
)

MODEL_NAMES = ("opt", "model", "pretrained", "distill_pretrained")  # their values may have a slash, or be a path

# Flags that determine the parameters: a run cannot be resumed with another value.
FIXED = (
    *("model", "opt", "siglip", "head_only", "lora", "match_logit"),
    *("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length"),
    *("lock_image", "lock_image_unlocked_groups", "lock_text", "lock_text_unlocked_layers"),
    *("opt_kwargs", "layer_decay", "image_lr_multiplier", "text_lr_multiplier"),
)
# Flags that only matter at the start of a run.
AT_START = ("pretrained", "pretrained_image", "init_match_scale", "init_match_shift", "init_logvar_bias")
