"""The joints between the parts of a long text follow its script."""

import pytest

from lingvo_gshard.decoding import joints


@pytest.mark.parametrize(
    ("parts", "want"),
    [
        ([], ""),
        (["one"], "one"),
        (["One, two.", "Three."], "One, two. Three."),
        (["Он сказал:", "«да»."], "Он сказал: «да»."),
        (["안녕하세요.", "반갑습니다."], "안녕하세요. 반갑습니다."),
        (["مرحبا،", "كيف حالك؟"], "مرحبا، كيف حالك؟"),
        (["नमस्ते।", "आप कैसे हैं?"], "नमस्ते। आप कैसे हैं?"),
        # Scripts without spaces.
        (["你好。", "再见。", "谢谢"], "你好。再见。谢谢"),
        (["他说：“你好”", "——然后走了。"], "他说：“你好”——然后走了。"),
        (["今日は、", "いい天気です。"], "今日は、いい天気です。"),
        (["ﾃｽﾄ", "ｶﾅ"], "ﾃｽﾄｶﾅ"),
        (["สวัสดีครับ", "วันนี้อากาศดี"], "สวัสดีครับวันนี้อากาศดี"),
        (["ສະບາຍດີ", "ຂອບໃຈ"], "ສະບາຍດີຂອບໃຈ"),
        (["សួស្តី", "អរគុណ"], "សួស្តីអរគុណ"),
        (["မင်္ဂလာပါ", "ကျေးဇူး"], "မင်္ဂလာပါကျေးဇူး"),
        (["བཀྲ་ཤིས།", "བདེ་ལེགས།"], "བཀྲ་ཤིས།བདེ་ལེགས།"),
        # Their punctuation and digits follow the letters.
        (["价格是100。", "200元"], "价格是100。200元"),
        (["二〇二四年", "(第3章)"], "二〇二四年(第3章)"),
        # Words of another script keep their space, and numbers stay separate.
        (["使用 Windows", "10 系统"], "使用 Windows 10 系统"),
        (["He said 你好", "and left."], "He said 你好 and left."),
        (["第100", "200号"], "第100 200号"),
        (["３", "４"], "３ ４"),
        # If one side lacks letters, the other decides; if both do, there is a space.
        (["语言", "(42)", "种"], "语言(42)种"),
        (["...", "!?"], "... !?"),
        # An empty part leaves no trace.
        (["", "one", "", "two", ""], "one two"),
        (["你", "", "好"], "你好"),
    ],
)
def test_parts_are_joined_as_their_script_is_written(parts, want):
    assert joints.joined(parts) == want
