"""EXTxxx: files that cannot be read or written. These end the run with exit code 2; nothing is written."""

from ortmoe_cli.rules.rule import Rule

_UNTOUCHED = "Nothing was written, and the input is never opened for writing."

RULES = (
    Rule(
        code="EXT101",
        title="file is not an ONNX model",
        what="The file is missing, a folder, cannot be read, or its bytes are not an ONNX model.",
        why="A common cause is a pointer file of a large-file store: a few lines of text instead of the model.",
        example="model.onnx is not an ONNX model",
        action="Check the path and the size of the file; fetch the large files of the repository that it came from.",
        safety=_UNTOUCHED,
    ),
    Rule(
        code="EXT102",
        title="external data missing",
        what="The model keeps weights in a second file, and that file is not beside it.",
        why="""
            Locations of external data are relative to the folder of the `.onnx` file. Copying the model alone loses
            its weights.
        """,
        example="the external data of weight 'lm_head.weight' is missing: no file 'model.onnx.data' beside the model",
        action="Copy the named file into the folder of the model, under the name that the message gives.",
        safety=_UNTOUCHED,
    ),
    Rule(
        code="EXT103",
        title="external data cut short",
        what="""
            The file with the weights is smaller than the model says, or a weight has fewer bytes than its shape
            needs.
        """,
        why="An interrupted download or copy, or a full disk while the model was saved.",
        example="'model.onnx.data' has 1048576 bytes, 4194304 are needed",
        action="Copy or download the file again and compare its size with the original.",
        safety=_UNTOUCHED,
    ),
    Rule(
        code="EXT104",
        title="external data outside the folder of the model",
        what="A weight lies at an absolute path or above the folder of the model.",
        why="""
            A model must not be able to read arbitrary files of the machine that it is opened on. The runtime
            refuses it too.
        """,
        example="the external data of weight 'w' lies outside the model's folder ('../../etc/passwd')",
        action="Move the file into the folder of the model and save the model with the plain file name.",
        safety=_UNTOUCHED,
    ),
    Rule(
        code="EXT105",
        title="graph is empty or invalid",
        what="The graph has no nodes, reads a tensor that nothing produces, or defines a name twice.",
        why="A graph that the runtime cannot load has no results that a fused model could be compared with.",
        example="two initializers are called 'w'",
        action="Check the export with `onnx.checker.check_model` and load it in ONNX Runtime first.",
        safety=_UNTOUCHED,
    ),
    Rule(
        code="EXT106",
        title="output cannot be written",
        what="The target is the input itself, its folder is missing or not writable, or the disk has too little space.",
        why="""
            The output appears whole or not at all, so space for all of it is needed beside the target before
            writing starts.
        """,
        example="out/fused.onnx: 61 GB are needed, 12 GB are free",
        action="""
            Choose another target with `-o`, free some space, or pass `--in-place` if you mean to replace the input.
        """,
        safety="What stood at the target before still stands there. No partial file is left behind.",
    ),
)
