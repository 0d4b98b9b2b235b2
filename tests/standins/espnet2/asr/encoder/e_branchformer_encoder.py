"""ESPnet2's E-Branchformer as of release 202511: its attention is called as the Branchformer's."""

from espnet2.asr.encoder import branchformer_encoder


class EBranchformerEncoderLayer(branchformer_encoder.BranchformerEncoderLayer):
    pass


class EBranchformerEncoder(branchformer_encoder.BranchformerEncoder):
    layer = EBranchformerEncoderLayer

    def __init__(self, *arguments, merge_conv_kernel, **options):
        super().__init__(*arguments, **options)
