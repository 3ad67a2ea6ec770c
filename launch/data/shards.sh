# Sourced by cc3m.sh, cc12m.sh and redcaps.sh: annotations to shards by img2dataset, then counted.
# shellcheck shell=bash
#
# usage: NAME.sh [--dry-run] ANNOTATIONS OUTPUT [img2dataset options]
#
# An interrupted run resumes: complete shards are not downloaded again. img2dataset requires pandas below 3, so it has
# its own environment, created by the first call.
#   PYTHON           creates that environment (default: python3)
#   IMG2DATASET_ENV  where it is (default: .img2dataset next to these scripts)
#   PROCESSES, THREADS  of the download (default: one process per core, 64 threads each)

# shellcheck source=launch/data/arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

make_shards() {
    local name run here rest
    read_arguments 2 'ANNOTATIONS OUTPUT [img2dataset options]' "$@" || return
    local annotations=${rest[0]} output=${rest[1]}
    set -- "${rest[@]:2}"
    local environment list columns='[]'
    environment=${IMG2DATASET_ENV:-$here/.img2dataset}
    list=$output/urls/$name.parquet
    [[ $name == redcaps ]] && columns='["subreddit"]'

    if [[ ! -e $environment/.ready ]]; then
        "${run[@]}" "${PYTHON:-python3}" -m venv "$environment"
        "${run[@]}" "$environment/bin/python" -m pip install --quiet 'img2dataset==1.47.0' 'pandas<3' pyarrow
        "${run[@]}" touch "$environment/.ready"
    fi
    # The list must not change: img2dataset resumes by shard index, which is a position in the list.
    if [[ ! -e $list ]]; then
        "${run[@]}" "$environment/bin/python" "$here/url_list.py" "$name" "$annotations" "$list"
    fi
    # img2dataset takes every *.json there for one of its own; the count at the end writes them again.
    "${run[@]}" rm -f "$output/sizes.json" "$output/sizes.report.json"
    "${run[@]}" env NO_ALBUMENTATIONS_UPDATE=1 "$environment/bin/img2dataset" \
        --url_list "$list" --input_format parquet --url_col url --caption_col caption \
        --save_additional_columns "$columns" \
        --output_folder "$output" --output_format webdataset --number_sample_per_shard 10000 \
        --image_size 512 --resize_mode keep_ratio --resize_only_if_bigger True --encode_quality 95 \
        --processes_count "${PROCESSES:-$(nproc)}" --thread_count "${THREADS:-64}" --retries 2 \
        --incremental_mode incremental --enable_wandb False "$@"
    "${run[@]}" pcmepp data count "$name=$output/*.tar"
}
