from neap_engine.cli.conversation import Conversation


def contents(conversation, question):
    return [(one.role, one.content) for one in conversation.messages(question)]


def test_the_oldest_turns_give_way_and_the_system_message_stays():
    conversation = Conversation(context_length=100, answer_tokens=30, system="be brief")
    conversation.add("a", "b", 20)
    conversation.add("c", "d", 35)
    conversation.add("e", "f", 60)
    assert conversation.make_room("x" * 20) == 0  # 60 + 10 + 30
    assert conversation.make_room("x" * 22) == 1
    assert conversation.num_tokens == 40
    said = [("system", "be brief"), ("user", "c"), ("assistant", "d"), ("user", "e")]
    assert contents(conversation, "g") == [*said, ("assistant", "f"), ("user", "g")]
    assert conversation.make_room("x" * 1000) == 2
    assert contents(conversation, "g") == [("system", "be brief"), ("user", "g")]
    assert conversation.num_tokens == 0


def test_clear_keeps_the_system_message():
    conversation = Conversation(100, 30, "be brief")
    conversation.add("a", "b", 90)
    conversation.clear()
    assert conversation.make_room("c") == 0
    assert contents(conversation, "c") == [("system", "be brief"), ("user", "c")]
