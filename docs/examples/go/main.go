// Streams one answer: go run . 127.0.0.1:7071 MODEL PROMPT
//
// `buf generate --template ../../../buf.gen.yaml ../../..` makes the generated code in this folder.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	inferencev1 "neap-example/gen/neap/inference/v1"
)

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: main TARGET MODEL PROMPT")
	}
	// Releases from 1.63 have grpc.NewClient and insecure.NewCredentials for this; the two used here work in every release 1.x.
	connection, err := grpc.Dial("dns:///"+os.Args[1], grpc.WithInsecure(),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()

	maxTokens := uint32(32)
	request := &inferencev1.GenerateRequest{
		ModelId: os.Args[2],
		Prompt: &inferencev1.GenerateRequest_Chat{Chat: &inferencev1.Chat{
			Messages: []*inferencev1.ChatMessage{{Role: "user", Content: os.Args[3]}},
		}},
		Stopping:  &inferencev1.Stopping{MaxTokens: &maxTokens},
		CanResume: true,
	}
	client := inferencev1.NewInferenceServiceClient(connection)
	tokens := []uint32{}
	for failures := 0; ; {
		numTokens := len(tokens)
		err := receive(ctx, client, request, &tokens)
		if err == io.EOF {
			break
		}
		if len(tokens) > numTokens {
			failures = 0
		}
		failures++
		if status.Code(err) != codes.Unavailable || failures == 4 {
			log.Fatalf("%s: %s", status.Code(err), status.Convert(err).Message())
		}
		time.Sleep(time.Duration(rand.Int63n(200<<failures)) * time.Millisecond)
	}
	fmt.Println()
}

// receive prints what one call brings, and adds it to the tokens. An answer that its worker interrupts goes on at another one: the request is
// changed so that the next call resumes it.
func receive(ctx context.Context, client inferencev1.InferenceServiceClient, request *inferencev1.GenerateRequest, tokens *[]uint32) error {
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return err
		}
		if started := event.GetStarted(); started != nil {
			if int(started.NumResumedTokens) != len(*tokens) {
				return status.Error(codes.FailedPrecondition, "an older worker, which begins anew")
			}
			request.Sampling = &inferencev1.Sampling{Seed: &started.Seed}
			request.Resume = &inferencev1.Resume{PromptDigest: started.PromptDigest, NumericsId: started.NumericsId}
		}
		for _, token := range event.GetChunk().GetTokens() {
			*tokens = append(*tokens, token.Id)
		}
		if request.Resume != nil {
			request.Resume.TokenIds = *tokens
		}
		fmt.Print(event.GetChunk().GetText() + event.GetFinished().GetText())
	}
}
