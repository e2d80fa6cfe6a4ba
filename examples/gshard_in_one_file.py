"""GShard in one file: a Mixture-of-Experts Transformer that learns to translate, on D devices.

    PYTHONPATH=. python examples/gshard_in_one_file.py [--tsv=FILE] [--steps=N] [--devices=N]

Each line of FILE is `source<TAB>target`. Without FILE, the program makes up a small language. The
devices are virtual ones, on any CPU. Comments name the sections of the paper (Lepikhin et al. 2020,
arXiv:2006.16668). A tensor's name ends with the letters of its dims: x_GSM is [G, S, M].

    G groups, S tokens of a group, E experts, C capacity, M model, H hidden, D devices, B batch
    L length, T source length, N heads, K size of a head, V vocabulary, k beam, P its places
"""

import argparse
import io

import numpy as np
import sentencepiece

import lingvo_gshard as gshard
from lingvo_gshard import NestedMap, replicate, split

gshard.prepare()  # Sets the environment that TensorFlow reads when it is imported.

import tensorflow as tf  # noqa: E402

D = 4  # --devices replaces it.
B = 64
L = 32
SIZES = {"M": 128, "H": 512, "N": 4, "K": 32, "E": 8, "V": 4000}
PAD, BOS, EOS = range(3)
TOKENIZER = {"byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2}
NEVER = -1e9  # Below any log-probability.


# 2.1 The Transformer. A layer attends to its own text, in the decoder also to the source, and ends
# with a feed-forward layer. In every other layer, that is a Mixture of Experts. Each of these takes
# a normalized input, and its output is added to the input.
def norm(w, x_BLM):
    x_BLM -= tf.reduce_mean(x_BLM, -1, keepdims=True)
    variance_BL1 = tf.reduce_mean(x_BLM**2, -1, keepdims=True)
    return x_BLM * tf.math.rsqrt(variance_BL1 + 1e-6) * w.scale_M + w.bias_M


def attention(w, x_BLM, memory_BTM, mask_BLT, earlier=None):
    """Returns what each token of x reads in the memory, and the memory's keys and values."""
    queries_BLNK = tf.einsum("BLM,MNK->BLNK", x_BLM, w.wq_MNK) * w.wq_MNK.shape[-1] ** -0.5
    keys_BTNK = tf.einsum("BTM,MNK->BTNK", memory_BTM, w.wk_MNK)
    values_BTNK = tf.einsum("BTM,MNK->BTNK", memory_BTM, w.wv_MNK)
    if earlier is not None:  # In a beam search, the tokens of earlier steps come first.
        keys_BTNK = tf.concat([earlier[0], keys_BTNK], 1)
        values_BTNK = tf.concat([earlier[1], values_BTNK], 1)

    logits_BNLT = tf.einsum("BLNK,BTNK->BNLT", queries_BLNK, keys_BTNK)
    weights_BNLT = tf.nn.softmax(tf.where(mask_BLT[:, None] > 0, logits_BNLT, NEVER))
    mixed_BLNK = tf.einsum("BNLT,BTNK->BLNK", weights_BNLT, values_BTNK)
    return tf.einsum("BLNK,NKM->BLM", mixed_BLNK, w.wo_NKM), (keys_BTNK, values_BTNK)


def stack(w, ids_BL, positions_L, mask_BLL, source=None, seed=None, earlier=None):
    """Returns the output of the encoder or decoder, l_aux, and each layer's keys and values."""
    # Embeddings with sinusoids (Vaswani et al. 2017, sections 3.4 and 3.5).
    M = w.embedding_VM.shape[1]
    angles_LM = np.outer(positions_L, np.geomspace(1, 1e-4, M // 2))
    sinusoids_LM = np.concatenate([np.sin(angles_LM), np.cos(angles_LM)], 1).astype("f")
    x_BLM = split(tf.gather(w.embedding_VM, ids_BL) * M**0.5 + sinusoids_LM, 0, D)

    aux_loss = 0.0
    memories = []
    for i, layer in enumerate(w.layers):
        h_BLM = norm(layer.own, x_BLM)
        y_BLM, memory = attention(layer.own, h_BLM, h_BLM, mask_BLL, earlier and earlier[i])
        x_BLM += y_BLM
        memories.append(memory)

        if source is not None:
            encoded_BTM, mask_BLT = source
            y_BLM, _ = attention(layer.source, norm(layer.source, x_BLM), encoded_BTM, mask_BLT)
            x_BLM += y_BLM

        h_BLM = norm(layer.feed_forward, x_BLM)
        if "wg_ME" in layer.feed_forward:  # A row of the batch is a group of tokens: G = B, S = L.
            y_BLM, loss = moe(layer.feed_forward, h_BLM, tf.cast(ids_BL != PAD, tf.float32), seed)
            aux_loss += loss
        else:
            h_BLH = tf.nn.relu(tf.einsum("BLM,MH->BLH", h_BLM, layer.feed_forward.wi_MH))
            y_BLM = tf.einsum("BLH,HM->BLM", h_BLH, layer.feed_forward.wo_HM)
        x_BLM = split(x_BLM + y_BLM, 0, D)
    return norm(w, x_BLM), aux_loss, memories


def encode(theta, source_BT, seed=None):
    """Returns the encoded source with its mask, and l_aux."""
    mask_B1T = tf.cast(source_BT != PAD, tf.float32)[:, None]
    positions = range(source_BT.shape[1])
    x_BTM, aux_loss, _ = stack(theta.encoder, source_BT, positions, mask_B1T, seed=seed)
    return (x_BTM, mask_B1T), aux_loss


# 2.2 Gating, Algorithm 1, which is a loop over the tokens of a group. Here a cumulative sum counts,
# for all tokens at once, how many before them chose the same expert. That count is a token's
# position in the expert's buffer. If it is C or more, the buffer is full and the token is dropped.
def top2_gating(gates_GSE, valid_GS, rnd_GS1, C):
    """Returns the gate of each token at its positions, combine_GSEC, and l_aux."""
    E = gates_GSE.shape[-1]
    # Lines 5 and 15: the two best experts of each token. Padding gets no expert.
    e1_GSE = tf.one_hot(tf.argmax(gates_GSE, -1), E) * valid_GS[..., None]
    e2_GSE = tf.one_hot(tf.argmax(gates_GSE - 2 * e1_GSE, -1), E) * valid_GS[..., None]

    # Lines 6 and 16: their gates, normalized.
    g_GSE = gates_GSE * (e1_GSE + e2_GSE)
    g_GSE = tf.math.divide_no_nan(g_GSE, tf.reduce_sum(g_GSE, -1, keepdims=True))

    # Lines 17 and 19: a token asks for its second expert with probability 2 * g2. If it does not
    # ask, it takes no position, as in Lingvo's code. In line 22, as printed, it takes one.
    e2_GSE *= tf.cast(2 * g_GSE > rnd_GS1, tf.float32)

    # Lines 7 to 11 and 18 to 22: positions. All first choices come before the second ones.
    c1_GSE = tf.cumsum(e1_GSE, axis=1, exclusive=True)
    c2_GSE = tf.cumsum(e2_GSE, axis=1, exclusive=True) + tf.reduce_sum(e1_GSE, 1, keepdims=True)

    # Lines 8, 9, 19 and 20: a one-hot row is all zeros for a position from C on.
    at1_GSEC = e1_GSE[..., None] * tf.one_hot(tf.cast(c1_GSE, tf.int32), C)
    at2_GSEC = e2_GSE[..., None] * tf.one_hot(tf.cast(c2_GSE, tf.int32), C)
    combine_GSEC = g_GSE[..., None] * (at1_GSEC + at2_GSEC)

    # Lines 3 and 13: l_aux is least where all experts have equal shares.
    size_G1 = tf.maximum(tf.reduce_sum(valid_GS, 1, keepdims=True), 1.0)
    m_GE = tf.reduce_sum(gates_GSE * valid_GS[..., None], 1) / size_G1
    c_GE = tf.reduce_sum(e1_GSE, 1) / size_G1
    return combine_GSEC, tf.reduce_mean(c_GE * m_GE)


# 3.1 and 3.2 The Mixture-of-Experts layer, Algorithm 2, with its annotations. The layer is written
# for one device. `split(x, 0, D)` changes no value: it puts slice d of x along dim 0 on device d.
# Tokens are split by group, and the experts' work by expert. Each change from one to the other is
# an all-to-all, which the compiler inserts.
def moe(w, x_GSM, valid_GS, seed=None):
    """Sends each token through its two best experts; returns their outputs and E^2 * l_aux."""
    G, S, _ = x_GSM.shape
    E = w.wi_EMH.shape[0]
    # Only training has a seed. Otherwise a token always gets both of its experts.
    C = S if seed is None else int(np.ceil(2 * S / E))
    rnd_GS1 = 0.0 if seed is None else tf.random.stateless_uniform([G, S, 1], seed, alg="threefry")

    x_GSM = split(x_GSM, 0, D)
    gates_GSE = tf.nn.softmax(tf.einsum("GSM,ME->GSE", x_GSM, replicate(w.wg_ME)))
    combine_GSEC, aux_loss = top2_gating(split(gates_GSE, 0, D), valid_GS, rnd_GS1, C)
    combine_GSEC = split(combine_GSEC, 0, D)
    dispatch_GSEC = tf.cast(combine_GSEC > 0, tf.float32)

    x_EGCM = split(tf.einsum("GSEC,GSM->EGCM", dispatch_GSEC, x_GSM), 0, D)
    h_EGCH = tf.nn.relu(tf.einsum("EGCM,EMH->EGCH", x_EGCM, w.wi_EMH))
    y_GECM = split(split(tf.einsum("EGCH,EHM->GECM", h_EGCH, w.wo_EHM), 1, D), 0, D)
    return split(tf.einsum("GSEC,GECM->GSM", combine_GSEC, y_GECM), 0, D), E**2 * aux_loss


# 2.2 The loss, L = l_nll + k * l_aux. l_aux is 1 / E^2 in perfect balance, so k is 0.01 * E^2.
def loss_of(theta, batch, seed=None):
    source, source_loss = encode(theta, batch.source_BT, seed)
    inputs_BL = batch.target_BL[:, :-1]
    L = inputs_BL.shape[1]
    x_BLM, target_loss, _ = stack(theta.decoder, inputs_BL, range(L), np.tri(L)[None], source, seed)
    logits_BLV = tf.einsum("BLM,MV->BLV", x_BLM, theta.decoder.softmax_MV)

    labels_BL = batch.target_BL[:, 1:]
    valid_BL = tf.cast(labels_BL != PAD, tf.float32)
    nll_BL = tf.nn.sparse_softmax_cross_entropy_with_logits(labels_BL, logits_BLV)
    nll = tf.reduce_sum(nll_BL * valid_BL) / tf.reduce_sum(valid_BL)
    return nll + 0.01 * (source_loss + target_loss)


# A.2 Adafactor divides a gradient by the root of v, its mean square over time. It keeps v as two
# means: over the dim M, which every weight has, and over the other dims, except a first dim E.
def means(x, dims):
    others = [dims.index(letter) for letter in dims.lstrip("E") if letter != "M"]
    over_M = tf.reduce_mean(x, dims.index("M"), keepdims=True)
    return over_M, tf.reduce_mean(x, others, keepdims=True)


def adafactor(step, name, weight, gradient, *slots):
    """Returns a weight and its slots, the means of v, after step 1, 2, ..."""
    dims = name.rpartition("_")[2]
    t = tf.cast(step, tf.float32)
    decay = 1 - t**-0.8
    pairs = zip(slots, means(tf.convert_to_tensor(gradient) ** 2, dims), strict=True)
    over_M, over_others = [decay * old + (1 - decay) * (new + 1e-30) for old, new in pairs]
    relative = over_others / tf.reduce_mean(over_others, dims.index("M"), keepdims=True)

    # An update has a root mean square of at most 1, and a step is relative to the weight's own.
    update = gradient * tf.math.rsqrt(over_M) * tf.math.rsqrt(relative)
    update /= tf.maximum(1.0, tf.reduce_mean(update**2) ** 0.5)
    scale = tf.maximum(1e-3, tf.reduce_mean(weight**2) ** 0.5)
    rate = tf.minimum(1.0, t / 100) * tf.maximum(t, 1000.0) ** -0.5  # The paper has 10,000.
    return weight - rate * scale * update, over_M, over_others


def train_step(state, batch):
    step = state.step + 1
    with tf.GradientTape() as tape:
        tape.watch(state.theta)
        loss = loss_of(state.theta, batch, seed=[step, 0])
    gradients = tape.gradient(loss, state.theta)

    names = state.theta.Pack(name for name, _ in state.theta.FlattenItems())
    trees = (state.theta, gradients, state.over_M, state.over_others)
    updated = names.Transform(lambda *leaves: adafactor(step, *leaves), *trees)
    parts = [updated.Transform(lambda leaf, i=i: leaf[i]) for i in range(3)]
    new_state = NestedMap(step=step, theta=parts[0], over_M=parts[1], over_others=parts[2])
    return NestedMap(state=new_state, loss=loss)


# A.1 Flat beam search. At each step, the k hypotheses of a sentence write their newest tokens to k
# more places of one flat sequence. A 0/1 mask marks the places of each hypothesis. Where the beam
# branches, only the mask is reordered: keys and values stay in their places.
def flat_beam_search(theta, batch, k=4, L=L):
    """Returns the best translation of each sentence, from BOS on: ids_BL."""
    B = batch.source_BT.shape[0]
    V = theta.decoder.softmax_MV.shape[1]
    source, _ = encode(theta, batch.source_BT)
    newest_Bk = tf.fill([B, k], BOS)
    total_Bk = tf.tile([[0.0] + [NEVER] * (k - 1)], [B, 1])  # The first hypothesis alone exists.
    flat_BP = tf.zeros([B, 0], tf.int32)
    mask_BkP = tf.zeros([B, k, 0])
    memories = None
    end_scores = []
    end_masks = []

    for t in range(L):
        flat_BP = tf.concat([flat_BP, newest_Bk], 1)
        mask_BkP = tf.concat([mask_BkP, tf.eye(k, batch_shape=[B])], 2)
        x_BkM, _, memories = stack(theta.decoder, newest_Bk, [t], mask_BkP, source, None, memories)
        logits_BkV = tf.einsum("BkM,MV->BkV", x_BkM, theta.decoder.softmax_MV)
        total_BkV = total_Bk[..., None] + tf.nn.log_softmax(logits_BkV)

        # A hypothesis may end if EOS is among the k best continuations, or at the last step. Its
        # score is normalized by its length (Wu et al. 2016, equation 14).
        best_Bk, _ = tf.math.top_k(tf.reshape(total_BkV, [B, k * V]), k)
        end_Bk = total_BkV[..., EOS]
        may_end_Bk = (end_Bk >= best_Bk[:, -1:]) | (t == L - 1)
        end_scores.append(tf.where(may_end_Bk, end_Bk / ((6 + t) / 6) ** 0.6, 2 * NEVER))
        end_masks.append(tf.pad(mask_BkP, [[0, 0], [0, 0], [0, k * (L - 1 - t)]]))

        # The k best continuations by a piece of text go on.
        going_on_BkV = tf.where(tf.range(V) > EOS, total_BkV, NEVER)
        total_Bk, index_Bk = tf.math.top_k(tf.reshape(going_on_BkV, [B, k * V]), k)
        newest_Bk = index_Bk % V
        mask_BkP = tf.einsum("Bkj,BjP->BkP", tf.one_hot(index_Bk // V, k), mask_BkP)

    # The mask of the best of all endings selects its tokens from the flat sequence.
    best_Bn = tf.one_hot(tf.argmax(tf.concat(end_scores, 1), 1), k * L)
    best_BP = tf.einsum("Bn,BnP->BP", best_Bn, tf.concat(end_masks, 1))
    ids_BLk = tf.reshape(tf.cast(best_BP, tf.int32) * flat_BP, [B, L, k])
    return NestedMap(ids_BL=tf.reduce_sum(ids_BLk, 2))


# 3.3 One program for D devices. A table says which letters are split over the devices. The compiler
# makes one program, which all devices run, each on its own slices.
def compiled(fn, donate=(), **args):
    def spec_of(item):
        name, x = item
        dims = name.rpartition("_")[2][:1] + "_" * x.ndim  # B or E is split if it is first.
        return gshard.TensorSpec(x.shape, x.dtype.name, dims[: x.ndim])

    specs = tuple(tree.Pack(map(spec_of, tree.FlattenItems())) for tree in args.values())
    table = gshard.Partitioning.from_dict(gshard.Mesh.flat(D), {"B": "d", "E": "d"})
    annotated = gshard.AnnotatedFn(fn.__name__, fn, tuple(args), specs, {}, donate, "B")
    return gshard.compile_program(gshard.export(annotated, table))


# 4.3 The weights. Their names have their dims, and their deviation keeps the scale of activations.
def new_state(rng):
    def weights(names):
        tree = NestedMap(scale_M=np.ones(SIZES["M"], "f"), bias_M=np.zeros(SIZES["M"], "f"))
        for name in names.split():
            shape = [SIZES[letter] for letter in name.rpartition("_")[2]]
            tree[name] = rng.normal(0, SIZES["M"] ** -0.5, shape).astype("f")
        return tree

    theta = NestedMap()
    for side, attentions in (("encoder", ["own"]), ("decoder", ["own", "source"])):
        theta[side] = NestedMap(weights("embedding_VM"), layers=[])
        for feed_forward in ("wi_MH wo_HM", "wg_ME wi_EMH wo_EHM"):
            layer = NestedMap({a: weights("wq_MNK wk_MNK wv_MNK wo_NKM") for a in attentions})
            theta[side].layers.append(NestedMap(layer, feed_forward=weights(feed_forward)))
    theta.decoder.softmax_MV = weights("softmax_MV").softmax_MV
    slots = [means(0 * x, name.rpartition("_")[2]) for name, x in theta.FlattenItems()]
    over_M, over_others = [theta.Pack(map(np.array, half)) for half in zip(*slots, strict=True)]
    return NestedMap(step=np.int32(0), theta=theta, over_M=over_M, over_others=over_others)


# 4.2 Text. Without a file, sources are numbers, and targets the names of their digits, backwards.
def read_pairs(path, rng):
    if path is not None:
        return np.loadtxt(path, str, delimiter="\t", comments=None, encoding="utf-8")
    names = "zero one two three four five six seven eight nine".split()
    table = str.maketrans({str(digit): f"{name} " for digit, name in enumerate(names)})
    numbers = [str(number) for number in rng.integers(1000, 10**8, 5000)]
    return [(" ".join(number), number[::-1].translate(table).strip()) for number in numbers]


def tokenized(texts):
    """Returns the pieces of each text, int32 [N, L + 1], and their tokenizer (A.2)."""
    model = io.BytesIO()  # Bytes are pieces, too: no character is unknown, and id 0 is padding.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=SIZES["V"], **TOKENIZER
    )
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    rows = tokenizer.encode(texts, add_bos=True, add_eos=True)
    return np.array([(row + [PAD] * L)[: L + 1] for row in rows], np.int32), tokenizer


def main():
    global D
    parser = argparse.ArgumentParser()
    parser.add_argument("--tsv")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--devices", type=int, default=D)
    flags = parser.parse_args()
    D = flags.devices
    gshard.prepare(num_devices=D)

    rng = np.random.default_rng(0)
    sources, targets = rng.permutation(read_pairs(flags.tsv, rng)).T.tolist()
    source_NT, source_tokenizer = tokenized(sources)
    target_NL, target_tokenizer = tokenized(targets)
    rows_N = np.flatnonzero((source_NT[:, -1] <= EOS) & (target_NL[:, -1] <= EOS))  # All that fit.

    def batch_of(rows):
        return NestedMap(source_BT=source_NT[rows], target_BL=target_NL[rows])

    held_out = batch_of(rows_N[:8])
    state = new_state(rng)
    step = compiled(train_step, ("state",), state=state, batch=batch_of(rows_N[:B]))
    print(step.report().table())
    for number in range(flags.steps):
        result = step(state, batch_of(rng.choice(rows_N[8:], B)))
        state = result.state
        if number % 20 == 0:
            print(f"step {number:5}  loss {float(result.loss):.3f}", flush=True)

    search = compiled(flat_beam_search, theta=state.theta, batch=held_out)
    ids_BL = np.asarray(search(state.theta, held_out).ids_BL)
    for source, target, ids in zip(held_out.source_BT, held_out.target_BL, ids_BL, strict=True):
        print("source:     ", source_tokenizer.decode(source[source > EOS].tolist()))
        print("reference:  ", target_tokenizer.decode(target[target > EOS].tolist()))
        print("translation:", target_tokenizer.decode(ids[ids > EOS].tolist()))


if __name__ == "__main__":
    main()
